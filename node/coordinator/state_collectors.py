"""Collectors of a coordinator's state at the moment of a scrape: peers, evaluations, the newest step."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Final, TypeAlias

import numpy as np
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from node.coordinator.fleet.membership import PeerState
from node.coordinator.fleet.survey import NOTHING_SEEN, Values
from node.coordinator.ledger.backup_record import BackupRecord
from node.identity.peer import Peer
from node.values.evaluation import Evaluation, EvaluationStatus
from node.values.peer_figures import FIGURES
from node.values.roles import MEMBER_ROLES
from node.values.run import SamplerStanding, StepReport, Teaching

_PEER_GAUGES: Final[tuple[tuple[str, str, str], ...]] = (
    ("version_lag_versions", "Head minus the version a peer holds.", "version_lag_versions"),
    ("lag_seconds", "Time since a version newer than a peer's was announced.", "lag_s"),
    ("silence_seconds", "Time since the last heartbeat of a peer.", "silence_s"),
    (
        "clock_offset_seconds",
        "The coordinator's clock minus a peer's, by the peer's own estimate.",
        "clock_offset_s",
    ),
)
"""Name, text, and which of ``survey.MEASURES``."""

_STEP_GAUGES: Final = (
    ("reward_mean", "Mean reward of the newest batch.", "reward_mean"),
    ("kl_nats", "KL divergence from behaviour to learner policy, newest batch.", "kl_nats"),
    ("ess_ratio", "Effective sample size over batch size, newest batch.", "ess_ratio"),
    ("staleness_mean_versions", "Mean staleness of the newest batch.", "staleness_mean_versions"),
)
"""Name, text, and which field of a ``StepReport``."""

_TEACHING_GAUGES: Final = (
    ("idle_seconds", "Since a batch taught something; 0 where the newest one did.", "idle_s"),
)
"""Name, text, and which field of ``Teaching``."""

QUANTILES: Final = (0.0, 0.5, 0.9, 1.0)
"""Lowest, median, one in ten is higher, highest."""


_Gauge: TypeAlias = tuple[str, str, Callable[[EvaluationStatus], Evaluation | None], str]

_EVALUATION_GAUGES: Final[tuple[_Gauge, ...]] = (
    ("version", "The version that was evaluated last.", attrgetter("newest"), "version"),
    ("reward_mean", "Its mean reward on held-out prompts.", attrgetter("newest"), "reward_mean"),
    (
        "reward_standard_error",
        "Standard error of that mean, between prompts.",
        attrgetter("newest"),
        "reward_standard_error",
    ),
    ("cut_ratio", "Share of its completions cut at the length limit.", attrgetter("newest"), "cut_ratio"),
    ("completion_tokens", "Mean length of its completions.", attrgetter("newest"), "tokens_mean"),
    ("samplers", "Samplers whose groups count in it.", attrgetter("newest"), "samplers"),
    ("best_version", "The version that did best on held-out prompts.", attrgetter("best"), "version"),
    (
        "waiting_prompts",
        "Held-out prompts without an answer that counts in the evaluation under way.",
        attrgetter("under_way"),
        "waiting_prompts",
    ),
)
"""Name, text, whose number it is, and which."""


class EvaluationCollector(Collector):
    """Metrics of evaluations: absent before the first; without a score where too few answered."""

    def __init__(self) -> None:
        self.status = EvaluationStatus()

    def collect(self) -> Iterator[Metric]:
        status = self.status
        for name, text, evaluation_of, field in _EVALUATION_GAUGES:
            gauge = GaugeMetricFamily(f"heterorl_coordinator_evaluation_{name}", text)
            if (value := getattr(evaluation_of(status), field, None)) is not None:
                gauge.add_metric([], value)
            yield gauge


class PeerCollector(Collector):
    """The fleet as metrics: the scraper's thread sees one survey whole, never parts of two."""

    def __init__(self) -> None:
        self.survey = NOTHING_SEEN

    def collect(self) -> Iterator[Metric]:
        survey = self.survey
        peers = GaugeMetricFamily(
            "heterorl_coordinator_peers", "Peers known, by role and state.", labels=["role", "state"]
        )
        for role, state in itertools.product(MEMBER_ROLES, PeerState):
            peers.add_metric([role, state], survey.counts.get((role, state), 0))
        yield peers
        standings = GaugeMetricFamily(
            "heterorl_coordinator_sampler_standings",
            "Samplers in the run by their standing.",
            labels=["standing"],
        )
        for standing in SamplerStanding:
            standings.add_metric([standing], survey.standings.get(standing, 0))
        yield standings
        for name, text, measure in _PEER_GAUGES:
            values = ((peer, getattr(measured, measure)) for peer, measured in survey.named)
            yield _by_name(name, text, values)
            yield _summary(name, text, survey.samplers[measure])
        for field, figure in FIGURES.items():
            has = ((peer, one.figures[field]) for peer, one in survey.named if field in one.figures)
            yield _by_name(figure.metric, figure.help, has)
            yield _summary(figure.metric, figure.help, survey.samplers[field])


class StepCollector(Collector):
    """The newest step and what the newest batches taught, as the learner reports them; none before."""

    def __init__(self) -> None:
        self.step: StepReport | None = None
        self.teaching: Teaching | None = None

    def collect(self) -> Iterator[Metric]:
        for report, gauges in ((self.step, _STEP_GAUGES), (self.teaching, _TEACHING_GAUGES)):
            for name, text, field in gauges:
                gauge = GaugeMetricFamily(f"heterorl_coordinator_step_{name}", text)
                if report is not None:
                    gauge.add_metric([], getattr(report, field))
                yield gauge


def _by_name(name: str, text: str, values: Iterable[tuple[Peer, float]]) -> Metric:
    gauge = GaugeMetricFamily(f"heterorl_coordinator_peer_{name}", text, labels=["node", "role"])
    for peer, value in values:
        gauge.add_metric([peer.node_id, peer.role], value)
    return gauge


def _summary(name: str, text: str, values: Values) -> Metric:
    """Return quantiles, sum and number of values over all samplers; without any only the number."""
    metric = SummaryMetricFamily(
        f"heterorl_coordinator_fleet_{name}", f"{text} Over all samplers.", labels=["quantile"]
    )
    finite = values[np.isfinite(values)]
    if len(finite):
        quantiles = np.quantile(finite, QUANTILES, method="inverted_cdf")
        for quantile, value in zip(QUANTILES, quantiles.tolist(), strict=True):
            metric.add_sample(metric.name, {"quantile": f"{quantile:g}"}, value)
    metric.add_sample(f"{metric.name}_sum", {}, float(finite.sum()))
    metric.add_sample(f"{metric.name}_count", {}, float(len(finite)))
    return metric


class BackupCollector(Collector):
    """Copies of the ledger as metrics; none where the ledger is a database, which has backups of its own."""

    def __init__(self) -> None:
        self.record: Callable[[], BackupRecord] | None = None
        """Returns what is on disk now."""

    def collect(self) -> Iterator[Metric]:
        age = GaugeMetricFamily(
            "heterorl_coordinator_backup_age_seconds",
            "Since `ledger backup` made the newest copy of the ledger; infinite before the first.",
        )
        failures = GaugeMetricFamily(
            "heterorl_coordinator_backup_failures",
            "Attempts in a row to copy the ledger that failed since the newest copy.",
        )
        if self.record is not None:
            record = self.record()
            age.add_metric([], record.age_s(now=time.time()))
            failures.add_metric([], record.failures)
        yield from (age, failures)
