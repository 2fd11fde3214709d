"""Unit, manifests, image and configurations agree with each other about ports, paths and patience."""

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deploy.check import DEPLOY, ROLES
from learner.contributor.config import ContributorConfig
from learner.merging.merge_config import MergeConfig
from node.config.settings import NodeConfig, load
from node.coordinator.config import CoordinatorConfig
from node.enrolment.init_run import IDENTITY_DIRECTORY, init_run
from node.errors import Reason
from node.identity.identity_store import load_identity
from node.relay.config import RelayConfig

UNIT: Final = (DEPLOY / "systemd/heterorl-node@.service").read_text()
IMAGE: Final = (DEPLOY / "Dockerfile").read_text()
MANIFESTS: Final = {
    "coordinator": "hub.yaml",
    "relay": "relay.yaml",
    "learner": "learner.yaml",
    "contributor": "contributor.yaml",
    "sampler": "samplers.yaml",
    "verifier": "verifier.yaml",
}


@cache
def config(role: str, folder: str) -> NodeConfig:
    file = DEPLOY / folder / f"{role}.toml"
    return load(roles=[role], files=[file], environ={}).config


@cache
def documents(role: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "k8s/base" / MANIFESTS[role]).read_text()))


def of_kind(kind: str, role: str) -> dict[str, Any]:
    (found,) = (document for document in documents(role) if document["kind"] == kind)
    return found


def pod(role: str) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind("StatefulSet", role)["spec"]["template"]["spec"]
    return spec


def container_of(role: str) -> dict[str, Any]:
    (container,) = pod(role)["containers"]
    return dict(container)


def ports_of(role: str) -> dict[str, int]:
    return {entry["name"]: entry["containerPort"] for entry in container_of(role)["ports"]}


def port(address: str | None) -> int:
    assert address is not None
    return int(address.rpartition(":")[2])


def unit_setting(key: str) -> str:
    (value,) = re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


@pytest.mark.parametrize("role", ROLES)
def test_systemd_and_kubernetes_wait_longer_for_the_drain_than_the_daemon(role: str) -> None:
    assert float(unit_setting("TimeoutStopSec")) > config(role, "config").node.drain_timeout_s
    patience_s = pod(role)["terminationGracePeriodSeconds"]
    assert patience_s > config(role, "k8s/base/config").node.drain_timeout_s


def test_on_a_host_a_role_writes_only_where_its_unit_lets_it() -> None:
    assert unit_setting("StateDirectory") == "heterorl-node/%i"
    assert {config(role, "config").node.state_dir for role in ROLES} == {Path("/var/lib/heterorl-node")}


@pytest.mark.parametrize("role", ROLES)
def test_in_a_pod_every_path_of_the_configuration_is_mounted(role: str) -> None:
    settings = config(role, "k8s/base/config")
    container = container_of(role)
    mounted = {Path(mount["mountPath"]): mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounted[settings.node.state_dir] is False
    assert mounted[settings.node.run_file.parent] is True
    section: Any = settings.roles[role]
    if role in ("learner", "contributor", "sampler", "verifier"):
        assert section.model_dir.parent in mounted
    assert Path(container["args"][-1]).parent in mounted
    assert container["args"][:2] == ["--role", role]


@pytest.mark.parametrize("role", ROLES)
def test_in_a_pod_the_probes_ask_where_the_telemetry_listens(role: str) -> None:
    telemetry = config(role, "k8s/base/config").telemetry
    container, ports = container_of(role), ports_of(role)
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe["path"] for probe in probes] == ["/healthz", "/healthz", "/readyz"]
    assert {ports[probe["port"]] for probe in probes} == {port(telemetry.http_listen)}


def test_the_hub_is_reached_where_its_configuration_listens() -> None:
    hub = config("coordinator", "k8s/base/config").section(CoordinatorConfig)
    ports = ports_of("coordinator")
    services = [document for document in documents("coordinator") if document["kind"] == "Service"]
    served = {
        entry["targetPort"]: entry["port"] for service in services for entry in service["spec"]["ports"]
    }
    assert served == ports
    assert (ports["node"], ports["enrolment"]) == (port(hub.listen), port(hub.enrolment_listen))
    for role in ("relay", "learner", "contributor", "sampler", "verifier"):
        assert config(role, "k8s/base/config").node.coordinator == f"heterorl-hub:{ports['node']}"


def test_the_relay_is_reached_where_its_configuration_listens() -> None:
    relay = config("relay", "k8s/base/config").section(RelayConfig)
    ports = ports_of("relay")
    service = of_kind("Service", "relay")
    (served,) = service["spec"]["ports"]
    assert served["port"] == ports[served["targetPort"]] == port(relay.listen)
    sampler = tomllib.loads((DEPLOY / "k8s/base/config/sampler.toml").read_text())["sampler"]
    assert sampler["weight_sources"] == [f"{service['metadata']['name']}:{served['port']}"]


def test_contributors_reach_the_learner_where_its_configuration_would_listen() -> None:
    ports = ports_of("learner")
    service = of_kind("Service", "learner")
    (served,) = service["spec"]["ports"]
    assert served["port"] == ports[served["targetPort"]]
    contributor = config("contributor", "k8s/base/config").section(ContributorConfig)
    assert contributor.learner == f"{service['metadata']['name']}:{served['port']}"
    file = (DEPLOY / "k8s/base/config/learner.toml").read_text()
    merging = tomllib.loads(re.sub(r"(?m)^# (?=\[learner\.merge\]|listen = )", "", file))["learner"]["merge"]
    assert port(MergeConfig.model_validate(merging).listen) == served["port"]
    (policy,) = (
        document
        for document in yaml.safe_load_all((DEPLOY / "k8s/base/network.yaml").read_text())
        if document["metadata"]["name"] == "heterorl-learner"
    )
    assert policy["spec"]["ingress"] == [{"ports": [{"port": served["targetPort"]}]}]
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["learner"]
    assert composed["ports"] == [f"${{BIND:-127.0.0.1}}:{served['port']}:{served['port']}"]


def test_the_image_exposes_and_asks_the_ports_of_the_configuration() -> None:
    settings = config("coordinator", "k8s/base/config")
    hub, metrics = settings.section(CoordinatorConfig), port(settings.telemetry.http_listen)
    (exposed,) = re.findall(r"^EXPOSE (.*)$", IMAGE, re.MULTILINE)
    merging = port(config("contributor", "k8s/base/config").section(ContributorConfig).learner)
    assert exposed == f"{port(hub.listen)} {port(hub.enrolment_listen)} {merging} {metrics}"
    assert re.findall(r"HTTP_LISTEN=\S*:(\d+)", IMAGE) == [str(metrics)]
    assert re.findall(r"http://127\.0\.0\.1:(\d+)/healthz", IMAGE) == [str(metrics)]


@pytest.mark.parametrize("folder", ["config", "k8s/base/config"])
def test_prometheus_scrapes_where_the_coordinator_shows_its_metrics(folder: str) -> None:
    server = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text())
    (target,) = server["scrape_configs"][0]["static_configs"][0]["targets"]
    assert port(target) == port(config("coordinator", folder).telemetry.http_listen)


def test_every_alert_reaches_somebody_by_its_urgency() -> None:
    monitoring = DEPLOY / "monitoring"
    server = yaml.safe_load((monitoring / "prometheus.yml").read_text())
    [sent_to] = server["alerting"]["alertmanagers"]
    assert sent_to["static_configs"] == [{"targets": ["127.0.0.1:9093"]}]
    sent = yaml.safe_load((monitoring / "alertmanager.yml").read_text())
    by_urgency = {route["matchers"][0]: route["receiver"] for route in sent["route"]["routes"]}
    assert by_urgency == {'severity = "page"': "pages"}
    assert sent["route"]["receiver"] == "tickets"
    assert {receiver["name"] for receiver in sent["receivers"]} == {"pages", "tickets"}
    rules = yaml.safe_load((monitoring / "rules.yml").read_text())["groups"]
    urgencies = {rule["labels"]["severity"] for group in rules for rule in group["rules"]}
    assert urgencies == {"page", "ticket"}


def test_composes_prometheus_differs_from_ours_in_addresses_only() -> None:
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    ours = (DEPLOY / "monitoring/prometheus.yml").read_text().replace("127.0.0.1:9464", "heterorl-hub:9464")
    ours = ours.replace("127.0.0.1:9465", "learner:9464")
    wanted = yaml.safe_load(ours.replace("127.0.0.1:9093", "alertmanager:9093"))
    assert yaml.safe_load(composed["configs"]["prometheus"]["content"]) == wanted
    assert {"alertmanager", "prometheus"} <= composed["services"].keys()


@pytest.mark.parametrize("role", ["coordinator", "learner"])
def test_a_pod_lays_out_what_init_made_once_and_as_secret_as_it_was(role: str, tmp_path: Path) -> None:
    init_run(tmp_path / "run", run_id="seeds", hosts=[], now=0.0)
    state, seed = tmp_path / "state", tmp_path / "state.tar"
    state.mkdir()
    subprocess.run(["tar", "-C", tmp_path / "run", "-cf", seed, role], check=True)
    (container,) = pod(role)["initContainers"]
    (script,) = container["args"]
    script = script.replace("/var/lib/heterorl-node", str(state)).replace("/seed/state.tar", str(seed))
    subprocess.run([*container["command"], script], check=True)
    assert [path.name for path in state.iterdir()] == [role]
    assert load_identity(state / role / IDENTITY_DIRECTORY) is not None
    seed.unlink()
    subprocess.run([*container["command"], script], check=True)


@pytest.mark.parametrize("role", ROLES)
def test_every_container_is_sealed(role: str) -> None:
    spec = pod(role)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    # Always (the default) opens private keys to the group, and the node refuses such keys.
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


def test_the_pod_monitor_scrapes_the_hub_under_the_job_that_the_rules_name() -> None:
    monitor = yaml.safe_load((DEPLOY / "k8s/podmonitor/podmonitor.yaml").read_text())["spec"]
    hub = of_kind("StatefulSet", "coordinator")
    assert monitor["selector"] == hub["spec"]["selector"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in ports_of("coordinator")
    # The fleet's metrics carry labels node and role of their own.
    assert endpoint["honorLabels"] is True
    (relabeling,) = endpoint["relabelings"]
    rules = (DEPLOY / "monitoring/rules.yml").read_text()
    assert set(re.findall(r'job="(\w+)"', rules)) == {relabeling["replacement"]}


def test_the_alert_on_refusals_names_the_reasons_that_the_code_calls_suspicious() -> None:
    rules = (DEPLOY / "monitoring/rules.yml").read_text()
    named = re.findall(r'heterorl_node_refusals_total\{reason=~"([a-z_|]+)"\}', rules)
    suspicious = {str(reason) for reason in Reason if reason.is_suspicious}
    assert [set(each.split("|")) for each in named] == [suspicious, suspicious]
    table = re.findall(r"^\| (`[a-z_`, ]+`) \|", (DEPLOY.parent / "docs/alerts.md").read_text(), re.MULTILINE)
    assert {reason for row in table for reason in re.findall("`([a-z_]+)`", row)} >= suspicious


def test_the_hourly_copy_reads_the_volume_of_the_hub_on_its_machine() -> None:
    (job,) = (
        document
        for document in yaml.safe_load_all((DEPLOY / "k8s/base/backup.yaml").read_text())
        if document["kind"] == "CronJob"
    )
    hub = of_kind("StatefulSet", "coordinator")
    spec = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (template,) = hub["spec"]["volumeClaimTemplates"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims["state"] == f"{template['metadata']['name']}-{hub['metadata']['name']}-0"
    (near,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near["labelSelector"] == hub["spec"]["selector"]
    mounted = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    (command,) = spec["containers"][0]["args"]
    assert f"--state-dir {mounted['state']} " in command
    assert f'--to "{mounted["backups"]}/' in command
