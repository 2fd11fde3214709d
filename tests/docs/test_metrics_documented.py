"""METRICS.md, the alert rules, the dashboards and the code name the same metrics. Imports no torch."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from deploy.check import DEPLOY
from learner.contributor.metrics import ContributorMetrics
from learner.metrics import LearnerMetrics
from node.coordinator.fleet.membership import PeerState
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work.slots.slot import SlotState
from node.errors import Reason
from node.relay.metrics import RelayMetrics
from node.system.clock import SystemClock
from node.telemetry.metrics import NodeMetrics
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.groups.verdict import Verdict
from node.values.roles import ROLES, Role
from sampler.metrics import SamplerMetrics, VerifierMetrics

ROOT: Final = DEPLOY.parent
MONITORING: Final = DEPLOY / "monitoring"

INSTRUMENT_MODULES: Final = {
    "learner/contributor/metrics.py",
    "learner/metrics.py",
    "node/coordinator/metrics.py",
    "node/relay/metrics.py",
    "node/telemetry/metrics.py",
    "node/telemetry/transfer_metrics.py",
    "sampler/metrics.py",
}
"""Where metrics are made: all of them are built below."""

FLEET_LABELS: Final = {"node", "role"}
"""Labels that prometheus.yml gives to the metrics of peers other than the coordinator."""

_FAMILIES: Final = (CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily)

SERVER_METRICS: Final = {"up": {"job", "instance"}, "process_start_time_seconds": {"job", "instance"}}

VALUES_OF_LABEL: Final[dict[str, set[str]]] = {
    "verdict": set(Verdict),
    "reason": set(Reason),
    "role": set(Role),
    "state": {*SlotState, *PeerState},
    "job": {"heterorl"},
}


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric as Prometheus sees it; counters with _total, histograms without suffix."""

    name: str
    type: str
    labels: frozenset[str]

    @property
    def series(self) -> set[str]:
        """Names a query may use."""
        if self.type == "histogram":
            return {f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
        if self.type == "summary":
            return {self.name, f"{self.name}_sum", f"{self.name}_count"}
        return {self.name}


class _Registry(CollectorRegistry):
    """Remembers what was registered: a metric with labels shows nothing of itself before its first use."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.registered.append(collector)


@cache
def instruments_in_code() -> dict[str, Instrument]:
    registry = _Registry()
    NodeMetrics(registry, roles=["coordinator"], clock=SystemClock())
    TransferMetrics(registry)
    CoordinatorMetrics(registry)
    RelayMetrics(registry)
    LearnerMetrics(registry)
    ContributorMetrics(registry)
    SamplerMetrics(registry)
    VerifierMetrics(registry)
    registered = (i for collector in registry.registered for i in instruments_of(collector))
    return {instrument.name: instrument for instrument in registered}


@cache
def queryable() -> dict[str, frozenset[str]]:
    """Return the series that a query may use, each with its labels."""
    return {name: one.labels for one in instruments_in_code().values() for name in one.series}


def instruments_of(collector: Collector) -> list[Instrument]:
    if isinstance(collector, Counter | Gauge | Histogram):
        return [instrument(collector._name, collector._type, collector._labelnames)]
    families = (family for family in collector.collect() if isinstance(family, _FAMILIES))
    return [instrument(family.name, family.type, family._labelnames) for family in families]


def instrument(name: str, kind: str, labels: Iterable[str]) -> Instrument:
    return Instrument(f"{name}_total" if kind == "counter" else name, kind, frozenset(labels))


def instruments_in_document() -> dict[str, Instrument]:
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \|([^|]*)\| ([^|]+) \| ([^|]+) \|$",
        (MONITORING / "METRICS.md").read_text(),
        re.MULTILINE,
    )
    assert all(unit.strip() and meaning.strip() for *_, unit, meaning in rows)
    assert len({name for name, *_ in rows}) == len(rows)
    return {
        name: Instrument(name, kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, *_ in rows
    }


@cache
def rules() -> dict[str, list[dict[str, Any]]]:
    """Return the alert rules of each group."""
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return {group["name"]: group["rules"] for group in groups}


def every_rule() -> list[dict[str, Any]]:
    return [rule for group in rules().values() for rule in group]


def queries() -> Iterator[tuple[str, str]]:
    """Return every PromQL expression with where it stands."""
    for rule in every_rule():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


@cache
def dashboards() -> dict[str, dict[str, Any]]:
    files = sorted((MONITORING / "dashboards").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in files}


def panels() -> list[dict[str, Any]]:
    return [panel for dashboard in dashboards().values() for panel in dashboard["panels"]]


def names_in(texts: Iterable[str]) -> set[str]:
    return {name for text in texts for name in re.findall(r"\bheterorl_\w+", text)}


def test_metrics_are_made_only_where_this_test_looks() -> None:
    making = r"prometheus_client.*\b(Counter|Gauge|Histogram|Summary|Info|Enum)\b|MetricFactory\("
    makers = {
        str(path.relative_to(ROOT))
        for package in ("node", "learner", "sampler")
        for path in (ROOT / package).rglob("*.py")
        if re.search(making, path.read_text())
    }
    assert makers - {"node/telemetry/metric_factory.py"} == INSTRUMENT_MODULES


def test_the_document_and_the_code_have_the_same_metrics() -> None:
    code, document = instruments_in_code(), instruments_in_document()
    assert sorted(document) == sorted(code)
    assert document == code


def test_names_follow_the_house_style() -> None:
    for instrument in instruments_in_code().values():
        assert re.fullmatch(
            rf"heterorl_(node|{'|'.join(ROLES)})_[a-z0-9_]+",
            instrument.name,
        )
        assert (instrument.type == "counter") == instrument.name.endswith("_total"), instrument.name


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_a_query_uses_metrics_labels_and_values_that_exist(where: str, query: str) -> None:
    known = queryable()
    used = names_in([query])
    assert used <= known.keys()
    server_labels = {label for name, labels in SERVER_METRICS.items() if name in query for label in labels}
    labels = (
        FLEET_LABELS | {"instance", "le"} | server_labels | {label for name in used for label in known[name]}
    )
    matched = re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', query)
    grouped = {
        label
        for group in re.findall(r"\b(?:by|without|on) \(([^)]*)\)", query)
        for label in group.split(", ")
    }
    assert {label for label, _ in matched} | (grouped - {""}) <= labels
    for label, values in matched:
        if label in VALUES_OF_LABEL:
            assert set(values.split("|")) <= VALUES_OF_LABEL[label]


def test_every_metric_that_a_text_of_the_rules_names_exists() -> None:
    known = {name for i in instruments_in_code().values() for name in {i.name, *i.series}}
    assert names_in([(MONITORING / "rules.yml").read_text()]) <= known


def test_every_alert_says_what_is_wrong_what_to_do_and_how_soon() -> None:
    for rule in every_rule():
        assert rule["labels"]["severity"] in {"page", "ticket"}, rule["alert"]
        texts = [rule["annotations"][part].strip() for part in ("summary", "description")]
        assert all(texts), rule["alert"]


def test_every_alert_leads_to_a_section_that_says_how_urgent_it_is() -> None:
    page = (ROOT / "docs/alerts.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n\n\*(\w+)\.\* ", page, re.MULTILINE))
    for group, of_group in rules().items():
        assert f"\n## {group.capitalize()}\n" in page
        for rule in of_group:
            assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
            assert sections.pop(rule["alert"]).lower() == rule["labels"]["severity"], rule["alert"]
    assert not sections, "sections of alerts that are no more"


def test_every_alert_is_fired_by_a_unit_test_and_kept_silent_by_another() -> None:
    tests = yaml.safe_load((MONITORING / "rules_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    silent = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fired == silent == {rule["alert"] for rule in every_rule()}


def test_the_dashboards_show_what_the_run_is_steered_by() -> None:
    shown = names_in(target["expr"] for panel in panels() for target in panel.get("targets", []))
    assert shown >= {
        "heterorl_coordinator_step_reward_mean",
        "heterorl_coordinator_step_kl_nats",
        "heterorl_coordinator_step_ess_ratio",
        "heterorl_learner_clip_ratio",
        "heterorl_learner_truncated_ratio",
        "heterorl_learner_drift_nats",
        "heterorl_learner_drift_error_nats",
        "heterorl_learner_expected_ess_ratio",
        "heterorl_learner_recommended_staleness_versions",
        "heterorl_coordinator_max_staleness_versions",
        "heterorl_learner_staleness_versions_bucket",
        "heterorl_coordinator_group_lag_seconds_sum",
        "heterorl_coordinator_groups_total",
        "heterorl_coordinator_peer_version_lag_versions",
        "heterorl_coordinator_slots",
        "heterorl_coordinator_evaluation_reward_mean",
        "heterorl_coordinator_reward_checks_total",
        "heterorl_coordinator_proven_liars_total",
        "heterorl_coordinator_fleet_tokens_per_second_sum",
        "heterorl_node_transfer_bytes_total",
        "heterorl_coordinator_peer_price_per_hour",
    }


def test_every_panel_has_a_title_a_description_and_the_unit_of_its_metrics() -> None:
    units = {"_nats": "suffix: nats", "_seconds": "s", "_ratio": "percentunit"}
    for panel in (one for one in panels() if one["type"] != "row"):
        title = panel["title"]
        assert title[:1].isupper(), title
        assert panel["description"].endswith("."), title
        shown = names_in(target["expr"] for target in panel["targets"])
        for suffix, unit in units.items():
            if all(name.endswith(suffix) for name in shown) and "86400" not in panel["targets"][0]["expr"]:
                assert panel["fieldConfig"]["defaults"]["unit"] == unit, title


@pytest.mark.parametrize("name", ["fleet", "run", "trust"])
def test_no_two_panels_lie_on_each_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboards()[name]["panels"]:
        place = panel["gridPos"]
        sides = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = set(itertools.product(*sides))
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
