"""The learner's metrics: one place for names, units and buckets."""

import math
import random
from dataclasses import dataclass
from typing import Final, Self

from prometheus_client import CollectorRegistry

from learner.disk_wait import DiskWait
from learner.merging.merge_metrics import MergeMetrics
from learner.step_log import StepLine
from learner.step_numbers import GAUGES
from node.system.clock import Clock
from node.telemetry.metric_factory import MetricFactory
from node.telemetry.metrics import NodeMetrics

_VERSIONS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)

_OF_STEP: Final = {
    **GAUGES,
    "recommended_staleness_versions": "Staleness at which half of the effective sample size should be left.",
    "tokens_per_second": "Completion tokens of the newest step over its time.",
}
"""Gauges by name, see ``StepLine.gauges``."""

_OF_AGE: Final = {
    "drift_nats": "KL(behaviour || learner) per token that an age alone makes.",
    "drift_error_nats": "Standard error of that.",
    "expected_ess_ratio": "Effective sample size over sample size that follows from it.",
}

_LAG: Final = "delivered: spooled to judged; trained: spooled to trained on; total: sampled to trained on."


class LearnerMetrics:
    """The learner's instruments, each written from the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        new = MetricFactory(registry, "learner")
        self._of_step = {name: new.unknown(name, help_text) for name, help_text in _OF_STEP.items()}
        self._of_age = {name: new.gauge(name, text, "age_versions") for name, text in _OF_AGE.items()}
        self._grader_metric = new.gauge(
            "grader_metric", "Mean of a grader's measure in the newest batch.", "name"
        )
        self.sampler_mismatch_nats = new.gauge(
            "sampler_mismatch_nats", "KL per token of a sampler's groups beyond the drift.", "sampler"
        )
        self.sampler_mismatch_error_nats = new.gauge(
            "sampler_mismatch_error_nats", "Standard error of the mismatch; 10: nothing is known.", "sampler"
        )
        self.sampler_measured_groups = new.gauge(
            "sampler_measured_groups", "Groups behind the mismatch, older ones as fractions.", "sampler"
        )
        self.unmeasured_samplers = new.gauge(
            "unmeasured_samplers", "Samplers that no other's groups compare with."
        )
        self.version = new.gauge("version", "Version of the parameters now.")
        self.best_version = new.unknown("best_version", "Version kept as the best so far.")
        self.checkpoint_version = new.gauge(
            "checkpoint_version",
            "Version of the newest checkpoint on disk: a restart takes later steps again.",
        )
        self.journal_bytes = new.gauge("journal_bytes", "Size of the entries in the journal.")
        self.replay_seconds = new.unknown(
            "replay_seconds", "Time that this start took to take the steps in the journal again."
        )
        self.published_version = new.gauge(
            "published_version", "Newest version signed and stored for upload."
        )
        self.buffered_groups = new.gauge("buffered_groups", "Groups that wait for a step.")
        self.uninformative_ratio = new.unknown(
            "uninformative_ratio", "Share of the groups of the newest 64 batches that taught nothing."
        )
        self.merging = MergeMetrics(new)
        self._make_counters(new)
        self._make_histograms(new)

    def _make_counters(self, new: MetricFactory) -> None:
        self.groups = new.counter("groups", "Groups by what became of them here.", "verdict")
        self.scored_groups = new.counter(
            "scored_groups",
            "Groups scored by the words of the version they name: measured, misnamed, out of reach.",
            "outcome",
        )
        self.doubled_groups = new.counter("doubled_groups", "Groups delivered again after a step; refused.")
        self.trained_tokens = new.counter("trained_tokens", "Completion tokens trained on.")
        self.clamped_tokens = new.counter("clamped_tokens", "Tokens whose log ratio was clamped.")
        self.lost_drain_streams = new.counter(
            "lost_drain_streams", "Losses of the stream that brings groups."
        )
        self.step_writes = new.counter(
            "step_writes",
            "Steps by what became of them at a writer: written, failed, dropped.",
            "writer",
            "outcome",
        )
        self.replays = new.counter(
            "replays",
            "Starts by whether the published words came out again: exact, inexact, unpublished.",
            "outcome",
        )
        self.checkpoint_written_bytes = new.counter(
            "checkpoint_written_bytes", "Bytes of checkpoints written."
        )
        self.rollbacks = new.counter("rollbacks", "Versions made by `heterorl-node rollback`.")
        self.skipped_steps = new.counter("skipped_steps", "Steps not taken: the gradient was not finite.")
        self.uninformative_batches = new.counter("uninformative_batches", "Batches consumed without a step.")
        self.unchanged_versions = new.counter(
            "unchanged_versions", "Versions that change no word: not published."
        )
        self.superseded_versions = new.counter(
            "superseded_versions", "Versions superseded before publishing."
        )

    def _make_histograms(self, new: MetricFactory) -> None:
        self.step_seconds = new.histogram("step_seconds", "From batch to new parameters.")
        self.journal_seconds = new.histogram("journal_seconds", "Making a step's journal entry durable.")
        self.checkpoint_copy_seconds = new.histogram(
            "checkpoint_copy_seconds", "Wait of training for the copy that a checkpoint is written from."
        )
        self.checkpoint_seconds = new.histogram(
            "checkpoint_seconds", "From that copy to a checkpoint on disk, beside training."
        )
        self.gate_wait_seconds = new.histogram(
            "gate_wait_seconds", "Wait of a step until the publisher has read the masters."
        )
        self.publish_seconds = new.histogram("publish_seconds", "From masters to stored for upload.")
        self.lag_seconds = new.histogram("lag_seconds", _LAG, "stage")
        self.staleness_versions = new.histogram(
            "staleness_versions", "Staleness of each group trained on.", buckets=_VERSIONS
        )

    def show_step(self, line: StepLine) -> None:
        """Show a step that was taken."""
        self.show_batch(line)
        self.version.set(line.version)
        self.step_seconds.observe(line.step_s)
        self.trained_tokens.inc(line.numbers.tokens)
        self.clamped_tokens.inc(line.numbers.clamped_tokens)
        for group in line.groups:
            self.staleness_versions.observe(group.staleness_versions)

    def show_batch(self, line: StepLine) -> None:
        """Show the numbers of the newest batch, whether a step was taken on it or not."""
        shown = line.gauges()
        for name, gauge in self._of_step.items():
            gauge.set(shown.get(name, math.nan))
        self._grader_metric.clear()  # of the newest batch only, so that there are never more than its names
        for name, mean in line.numbers.batch.grader_metrics.items():
            self._grader_metric.labels(name).set(mean)

    def show_age(self, age_versions: int, **values: float) -> None:
        """Show what is measured and expected of tokens of an age; NaN: not measured."""
        for name, value in values.items():
            self._of_age[name].labels(str(age_versions)).set(value)


@dataclass(frozen=True, slots=True)
class Instruments:
    """Clock, metrics and the wait for a full disk, which all services of a learner share."""

    clock: Clock
    metrics: LearnerMetrics
    node_metrics: NodeMetrics
    disk_wait: DiskWait

    @classmethod
    def of(cls, registry: CollectorRegistry, node_metrics: NodeMetrics, *, clock: Clock) -> Self:
        """Register the learner's metrics."""
        disk_wait = DiskWait(node_metrics=node_metrics, clock=clock, random=random.random)
        return cls(clock, LearnerMetrics(registry), node_metrics, disk_wait)
