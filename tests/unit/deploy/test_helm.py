"""The Helm chart and the kustomization deploy the same objects."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from deploy import check

CHART: Final = check.DEPLOY / "helm"
Objects = dict[tuple[str, str], dict[str, Any]]


def by_name(documents: list[dict[str, Any]]) -> Objects:
    """Return objects by kind and name, without what each tool adds for itself.

    kustomize names the namespace and puts a hash into names of config maps. The chart has annotations: hooks,
    and a checksum of the configuration, so that a change of it restarts the pods.
    """
    objects = {}
    for document in documents:
        plain = json.loads(re.sub(r"(-config)-[0-9a-z]{10}\b", r"\1", json.dumps(document)))
        template = plain.get("spec", {}).get("template", {})
        for metadata in (plain["metadata"], template.get("metadata", {})):
            metadata.pop("annotations", None)
        for named in (plain["metadata"], *plain.get("subjects", [])):
            named.pop("namespace", None)
        objects[plain["kind"], plain["metadata"]["name"]] = plain
    return objects


def charted(*arguments: str) -> Objects:
    documents, complaints = check.charted(CHART, *arguments)
    assert complaints == []
    return by_name(documents)


@pytest.mark.needs("helm", "kubectl")
def test_the_chart_renders_what_the_example_overlay_does() -> None:
    documents, complaints = check.rendered(check.DEPLOY / "k8s/overlays/example")
    assert complaints == []
    wanted = by_name([document for document in documents if document["kind"] != "Namespace"])
    assert charted() == wanted


@pytest.mark.needs("helm")
def test_values_change_what_they_say(tmp_path: Any) -> None:
    (tmp_path / "hub.toml").write_text("[coordinator]\n")
    objects = charted(
        "--set=images.heterorl-sampler=here/sampler:1,replicas.heterorl-sampler=7,gpus.sampler=0",
        "--set=hub.service=ClusterIP,podMonitor=false,dashboards=false,monitoringNamespace=watch",
        "--set=bootstrap.hosts={a,b},bootstrap.tokenUses=9",
        f"--set-file=config.coordinator={tmp_path / 'hub.toml'}",
        '--set-json=overrides={"StatefulSet/heterorl-hub":{"spec":{"template":{"spec":{"nodeSelector":{"d":"ssd"}}}}}}',
    )
    sampler = objects["StatefulSet", "heterorl-sampler"]["spec"]
    (container,) = sampler["template"]["spec"]["containers"]
    assert (container["image"], sampler["replicas"]) == ("here/sampler:1", 7)
    assert "tolerations" not in sampler["template"]["spec"]
    assert set(container["resources"]["limits"]) == {"memory"}
    assert "type" not in objects["Service", "heterorl-hub"]["spec"]
    assert not {("PodMonitor", "heterorl"), ("ConfigMap", "heterorl-dashboards")} & objects.keys()
    assert objects["ConfigMap", "heterorl-hub-config"]["data"] == {"coordinator.toml": "[coordinator]\n"}
    hub = objects["StatefulSet", "heterorl-hub"]["spec"]["template"]["spec"]
    assert hub["nodeSelector"] == {"d": "ssd"}
    assert hub["containers"][0]["image"] == "registry.example.org/heterorl-coordinator:0.4.0"
    policy = json.dumps(objects["NetworkPolicy", "heterorl-hub"])
    assert '{"kubernetes.io/metadata.name": "watch"}' in policy
    job = objects["Job", "heterorl-bootstrap"]["spec"]["template"]["spec"]["containers"][0]
    environ = {entry["name"]: entry.get("value") for entry in job["env"]}
    assert (environ["HUB_HOSTS"], environ["TOKEN_USES"]) == ("a,b", "9")


@pytest.mark.needs("helm")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("--set=relicas.heterorl-sampler=3", "'relicas' not allowed"),
        ("--set=hub.service=NodePort", "must be one of"),
        ("--set=modelGigabytes=7B", "want integer"),
        ('--set-json=overrides={"statefulset/heterorl-hub":{}}', "does not match pattern"),
        ('--set-json=overrides={"Service/heterorl-hubb":{}}', "nothing is named Service/heterorl-hubb"),
        (
            '--set-json=overrides={"PodMonitor/heterorl":{}} --set=podMonitor=false',
            "nothing is named PodMonitor",
        ),
    ],
)
def test_a_misspelt_value_is_an_error(value: str, said: str) -> None:
    _, complaints = check.charted(CHART, *value.split(" "))
    assert said in "".join(complaints)


def test_no_table_of_values_takes_a_key_that_it_does_not_list() -> None:
    def tables(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield schema
        for inner in schema.get("properties", {}).values():
            yield from tables(inner)

    found = [
        table
        for table in tables(json.loads((CHART / "values.schema.json").read_text()))
        if "properties" in table
    ]
    assert len(found) > 5
    assert all(table["additionalProperties"] is False for table in found)


@pytest.mark.needs("helm")
def test_volumes_follow_the_models_size_no_replica_is_none_and_a_run_made_by_hand_needs_no_job() -> None:
    replicas = "replicas.heterorl-verifier=0,replicas.heterorl-contributor=3"
    objects = charted(f"--set=modelGigabytes=16,bootstrap.enabled=false,{replicas}")
    requested = {}
    for name in ("hub", "relay", "learner", "contributor", "sampler", "verifier"):
        spec = objects["StatefulSet", f"heterorl-{name}"]["spec"]
        (claim,) = spec["volumeClaimTemplates"]
        requested[name] = claim["spec"]["resources"]["requests"]["storage"]
    assert requested == {
        "hub": "190Gi", "relay": "190Gi", "learner": "660Gi", "contributor": "76Gi", "sampler": "76Gi",
        "verifier": "1Gi",
    }  # fmt: skip
    assert objects["StatefulSet", "heterorl-verifier"]["spec"]["replicas"] == 0
    assert objects["StatefulSet", "heterorl-contributor"]["spec"]["replicas"] == 3
    assert "heterorl-bootstrap" not in {name for _, name in objects}


@pytest.mark.needs("helm")
def test_sealed_samplers_reach_the_ports_of_hub_and_relay_and_a_name_server() -> None:
    objects = charted("--set=sealSamplers=true")
    policy = objects["NetworkPolicy", "heterorl-sealed"]["spec"]
    assert policy["policyTypes"] == ["Egress"]
    reached = {}
    for rule in policy["egress"]:
        (to,) = rule["to"]
        (name,) = to["podSelector"]["matchLabels"].values()
        reached[name] = sorted({entry["port"] for entry in rule["ports"]})
    listened = {}
    for name in ("heterorl-hub", "heterorl-relay"):
        spec = objects["StatefulSet", name]["spec"]["template"]["spec"]
        ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
        listened[name] = sorted(port for port_name, port in ports.items() if port_name != "metrics")
    assert reached == {**listened, "kube-dns": [53]}
