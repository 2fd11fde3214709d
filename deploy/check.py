"""Hold every deployment file to the tool that will read it, offline: ``python -m deploy.check``.

One line per check, the complaints below it, exit 1 if there is one. A missing tool is a complaint
that says how to install it: a check that was not made is not a check that passed.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.image_context import image_wheel_complaints
from deploy.monitoring.grafana import plain_query
from deploy.needs import sentence, tool_path

DEPLOY: Final = Path(__file__).resolve().parent
Check = tuple[str, Callable[[], list[str]]]
"""Its name, and how to get its complaints."""

ROLES: Final = ("coordinator", "relay", "learner", "contributor", "sampler", "verifier")

EXPOSURE_LIMIT: Final = 1.2
"""Exposure, from systemd's 0 (sealed) to 10. Left are sockets, memory that torch may execute, and, for
programs, namespaces without a network."""

ROOT_EXPOSURE: Final = 0.1
"""More, where a unit reads the folder of a user that exists only while its own unit runs."""

GPU_EXPOSURE: Final = 0.2
"""More, where a drop-in opens devices."""

KUBERNETES_VERSIONS: Final = ("1.29.0", "1.33.0", "1.37.0")
"""Kubernetes releases whose schemas the manifests are held to: the oldest supported, and newer ones."""

ROOT_UNITS: Final = ("heterorl-backup",)

CUSTOM_KINDS: Final = ("PodMonitor",)
"""Kinds that are not Kubernetes' own, so that it has no schema for them."""


class ToolMissingError(Exception):
    """A tool is neither beside this Python nor on PATH."""

    def __init__(self, tool: str) -> None:
        super().__init__(sentence(tool))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A tool's answer: only no output and exit code 0 are full approval."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def complaints(self) -> list[str]:
        """Every line said, when the tool failed."""
        if self.exit_code == 0:
            return []
        return (self.stdout + self.stderr).strip().splitlines() or [f"exit {self.exit_code}, and not a word"]


def run_tool(tool: str, *arguments: str | Path) -> Outcome:
    """Run a tool of this environment, or of the machine, to its end."""
    program = tool_path(tool)
    if program is None:
        raise ToolMissingError(tool)
    return _run(program, *arguments)


def _run(*command: str | Path) -> Outcome:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    return Outcome(done.returncode, done.stdout, done.stderr)


# Configuration


def config_complaints(role: str, file: Path) -> list[str]:
    """Return the daemon's own complaints, by a dry run, about one role's configuration."""
    return _run(sys.executable, "-m", "node", "config", "--role", role, "--config", file).complaints


# systemd


def unit_complaints(units: Path, name: str) -> list[str]:
    """Return systemd's complaints about ``heterorl-node@<instance>.service`` with its drop-ins.

    Judged in a root of its own, where the program exists and the targets are stubs, so that nothing
    of this machine is said. ``verify`` gives 0 even where it ignores a key: any word is a complaint.
    """
    unit = f"{name}.service"
    limit = EXPOSURE_LIMIT + GPU_EXPOSURE * (units / f"{unit}.d").is_dir()
    limit += ROOT_EXPOSURE * (name in ROOT_UNITS)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        installed = root / "etc/systemd/system"
        shutil.copytree(units, installed, ignore=shutil.ignore_patterns("*.md"))
        for target in ("basic", "multi-user", "network-online", "shutdown", "sysinit", "timers"):
            (installed / f"{target}.target").write_text("[Unit]\n")
        for program in ("opt/heterorl-node/bin/heterorl-node", "opt/heterorl-node/bin/python", "bin/sh"):
            path = root / program
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n")
            path.chmod(0o755)
        timers = [timer.name for timer in installed.glob(f"{name}.timer")]
        verified = run_tool("systemd-analyze", "verify", f"--root={root}", "--man=no", unit, *timers)
        judged = run_tool(
            "systemd-analyze", "security", f"--root={root}", "--offline=true", "--no-pager",
            f"--threshold={limit * 10:.0f}", unit,
        )  # fmt: skip
    complaints = verified.complaints or verified.stderr.strip().splitlines()
    if judged.exit_code != 0:
        complaints += judged.stdout.strip().splitlines()[-1:] or judged.complaints
    return [complaint.replace(f"{root}/etc/systemd/system/", "") for complaint in complaints]


# Kubernetes


def rendered(kustomization: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the documents of a kustomization as ``kubectl apply -k`` would send them, and the complaints."""
    outcome = run_tool("kubectl", "kustomize", kustomization)
    # Deprecated fields are a warning on stderr today and an error in a later kubectl.
    complaints = outcome.complaints or outcome.stderr.strip().splitlines()
    documents = [document for document in yaml.safe_load_all(outcome.stdout) if document]
    return documents, complaints


def manifest_complaints(kustomization: Path) -> list[str]:
    """Return complaints of kubectl, or of Kubernetes' strict schemas, about a kustomization."""
    documents, complaints = rendered(kustomization)
    return complaints or schema_complaints(documents)


def charted(chart: Path, *arguments: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the documents that ``helm install`` with ``arguments`` would send, and the complaints."""
    outcome = run_tool("helm", "template", "run", chart, *arguments)
    documents = [document for document in yaml.safe_load_all(outcome.stdout) if document]
    return documents, outcome.complaints


def chart_complaints(chart: Path) -> list[str]:
    """Return complaints of Helm, or of Kubernetes' strict schemas, about a chart."""
    complaints = run_tool("helm", "lint", "--strict", chart).complaints
    if complaints:
        return complaints
    documents, complaints = charted(chart, "--set=sealSamplers=true")
    return complaints or schema_complaints(documents)


def schema_complaints(documents: list[dict[str, Any]]) -> list[str]:
    """Return complaints of the strict schemas of every release in KUBERNETES_VERSIONS."""
    with tempfile.TemporaryDirectory() as directory:
        files = []
        for document in documents:
            if document["kind"] in CUSTOM_KINDS:
                continue
            files.append(Path(directory) / f"{document['kind']}-{document['metadata']['name']}.yaml")
            files[-1].write_text(yaml.safe_dump(document))
        return [
            f"{version}: {line.replace(f'{directory}/', '')}"
            for version in KUBERNETES_VERSIONS
            for line in run_tool(
                "kubernetes-validate", "--strict", "--quiet", "-k", version, *files
            ).complaints
        ]


# Image


def image_complaints(dockerfile: Path) -> list[str]:
    """Return hadolint's complaints about a Dockerfile."""
    return run_tool("hadolint", dockerfile).complaints


def wheel_complaints(root: Path, dockerfile: Path) -> list[str]:
    """Return what keeps the wheel from being built, or from starting, of what the Dockerfile copies."""
    with tempfile.TemporaryDirectory() as scratch:
        return image_wheel_complaints(root, dockerfile, Path(scratch))


def composed(file: Path, **environ: str) -> dict[str, Any]:
    """Return a Compose file with its anchors and variables resolved, as Compose reads it.

    A variable that must be set, and is not in ``environ``, is its own name.
    """

    def value(variable: re.Match[str]) -> str:
        whole, name, kind, text = variable.group(0, 1, 2, 3)
        return "$" if whole == "$$" else environ.get(name) or (text if kind == "-" else name)

    text = re.sub(r"\$\$|\$\{(\w+):([-?])([^}]*)\}", value, file.read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def compose_complaints(file: Path) -> list[str]:
    """Return the complaint of the Compose specification's types about a file."""
    try:
        from compose_spec import PyCompose
    except ImportError:
        return ["schema here: pip install compose-spec"]
    try:
        PyCompose.from_yaml(yaml.safe_dump(composed(file)))
    except ValueError as error:
        return [str(error)]
    return []


# Monitoring


def rule_complaints(monitoring: Path) -> list[str]:
    """Return promtool's complaints about the alert rules, their unit tests and the server's configuration."""
    return [
        *run_tool("promtool", "check", "rules", "--lint-fatal", monitoring / "rules.yml").complaints,
        *run_tool("promtool", "test", "rules", monitoring / "rules_test.yml").complaints,
        *run_tool("promtool", "check", "config", monitoring / "prometheus.yml").complaints,
    ]


def dashboard_complaints(file: Path) -> list[str]:
    """Return complaints of Grafana's own schema, and of promtool for the queries, about a dashboard."""
    dashboard = json.loads(file.read_text())
    complaints = [f"Grafana knows no {path}" for path in _keys_grafana_drops(dashboard)]
    ids = [panel["id"] for panel in dashboard["panels"]]
    complaints += [
        f"panel id {number} is used twice" for number in sorted({n for n in ids if ids.count(n) > 1})
    ]
    rules = [
        {"record": f"panel:{panel['id']}:{target['refId']}", "expr": plain_query(target["expr"])}
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    with tempfile.TemporaryDirectory() as directory:
        queries = Path(directory) / "queries.yml"
        queries.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
        complaints += run_tool("promtool", "check", "rules", queries).complaints
    return complaints


def _keys_grafana_drops(dashboard: dict[str, Any]) -> Iterator[str]:
    try:
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
        from grafana_foundation_sdk.cog.plugins import register_default_plugins
        from grafana_foundation_sdk.models.dashboard import Dashboard
    except ImportError:
        yield "schema here: pip install grafana-foundation-sdk"
        return
    register_default_plugins()
    understood = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(dashboard)))
    yield from _missing(dashboard, understood, "dashboard")


def _missing(wanted: Any, given: Any, path: str) -> Iterator[str]:
    if isinstance(wanted, dict) and isinstance(given, dict):
        for key, value in wanted.items():
            if key in given:
                yield from _missing(value, given[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(wanted, list) and isinstance(given, list) and len(wanted) == len(given):
        for index, (one, other) in enumerate(zip(wanted, given, strict=True)):
            yield from _missing(one, other, f"{path}[{index}]")
    elif wanted != given:
        yield f"{path} = {wanted!r}"


# Everything


def all_checks() -> Iterator[Check]:
    """Return every check there is."""
    for folder in (DEPLOY / "config", DEPLOY / "k8s/base/config"):
        for role in ROLES:
            file = folder / f"{role}.toml"
            yield f"config {file.relative_to(DEPLOY)}", partial(config_complaints, role, file)
    for unit in (*(f"heterorl-node@{role}" for role in ROLES), "heterorl-programs@0", *ROOT_UNITS):
        yield f"systemd {unit}", partial(unit_complaints, DEPLOY / "systemd", unit)
    ranks = DEPLOY / "k8s/overlays/ranks"
    yield (
        "config k8s/overlays/ranks/config/learner.toml",
        partial(config_complaints, "learner", ranks / "config/learner.toml"),
    )
    for kustomization in (DEPLOY / "k8s/base", DEPLOY / "k8s/overlays/example", ranks):
        yield f"kubernetes {kustomization.relative_to(DEPLOY)}", partial(manifest_complaints, kustomization)
    yield "kubernetes helm", partial(chart_complaints, DEPLOY / "helm")
    yield "image Dockerfile", partial(image_complaints, DEPLOY / "Dockerfile")
    yield (
        "image wheel, of what the Dockerfile copies",
        partial(wheel_complaints, DEPLOY.parent, DEPLOY / "Dockerfile"),
    )
    yield "compose compose.yaml", partial(compose_complaints, DEPLOY / "compose.yaml")
    yield "prometheus rules, their tests, prometheus.yml", partial(rule_complaints, DEPLOY / "monitoring")
    for dashboard in sorted((DEPLOY / "monitoring/dashboards").glob("*.json")):
        yield f"dashboard {dashboard.name}", partial(dashboard_complaints, dashboard)


def report(checks: Iterable[Check]) -> int:
    """Make every check, print what came of it, and give the exit code."""
    has_failed = False
    for name, complaints_of in checks:
        try:
            complaints = complaints_of()
        except ToolMissingError as missing:
            complaints = [str(missing)]
        has_failed |= bool(complaints)
        print(f"{'FAIL' if complaints else 'ok  '} {name}")
        for complaint in complaints:
            print(f"       {complaint}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(report(all_checks()))
