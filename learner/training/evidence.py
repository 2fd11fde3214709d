"""Evidence from trained batches: how much they teach, how far the policy drifts, which samplers do not fit.

    batch --observe--> share that teaches; drift by age; mismatch by sampler --> staleness bound, quarantines

A group whose completions all have the same reward has no advantage: the learner consumes it and learns
nothing. Where that is so of whole batches no step is taken, and an operator has to hear of it, because KL and
effective sample size look healthy.
"""

import math
import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from learner.config import LearnerConfig
from learner.intake.divergence_panel import KNOTS, Estimate, Observed
from learner.intake.named_versions import NamedVersions, Scored
from learner.intake.sampler_mismatch import SamplerMismatches
from learner.intake.staleness_bound import LEAST_GROUPS, WeighedSample, recommended_staleness
from learner.metrics import LearnerMetrics
from learner.step_log import RollbackLine, StepLine
from node.system.clock import Clock
from node.values.run import StepReport, Teaching

RECORDED_BATCHES: Final = 64
"""Newest batches whose share of teaching groups is reported: that of one batch of a few groups jumps."""

_UNKNOWN: Final = Estimate(math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Findings:
    """Samplers to act on after a step, and groups to look at."""

    quarantines: dict[str, str]
    """Samplers to quarantine, with the reason; "" to release one."""
    to_score: tuple[tuple[int, ...], ...] = ()
    """As ``Found.to_score``."""


class Evidence:
    """The record of this process; nothing of it is in a checkpoint."""

    def __init__(
        self, config: LearnerConfig, *, clock: Clock, metrics: LearnerMetrics, has_words: bool = False
    ) -> None:
        """Begin; ``has_words``: groups can be scored by the versions that they name."""
        self._clock = clock
        self._metrics = metrics
        self._threshold_nats = config.quarantine_mismatch_nats
        threshold_nats = config.quarantine_mismatch_nats
        named = NamedVersions(threshold_nats, random=random.random) if has_words else None
        self.mismatches = SamplerMismatches(threshold_nats, named=named)
        self._sample = WeighedSample.of(config.objective, config.objective_options)
        self._recommended = recommended_staleness({}, sample=self._sample, tokens=0.0)
        self._batches: deque[tuple[int, int]] = deque(maxlen=RECORDED_BATCHES)
        """Groups, and those of them that taught nothing."""
        self._reward_mean = 0.0
        self._taught_at_s = clock.monotonic()
        self.idle_batches = 0
        """Newest batches in a row that taught nothing."""

    @property
    def teaching(self) -> Teaching | None:
        """Share of the newest batches that taught; None before the first."""
        if not self._batches:
            return None
        groups, uninformative = map(sum, zip(*self._batches, strict=True))
        idle_s = self._clock.monotonic() - self._taught_at_s if self.idle_batches else 0.0
        return Teaching(groups, uninformative, self._reward_mean, idle_s)

    def completed(self, line: StepLine) -> StepLine:
        """Return a step's line with the staleness bound that this process recommends."""
        return replace(line, recommended_staleness=self._recommended)

    def report_of(self, newest: StepLine | RollbackLine | None) -> StepReport | None:
        """Return the report of the newest line; None: there is none, or it tells of a rollback."""
        return self.completed(newest).report() if isinstance(newest, StepLine) else None

    def observe(
        self, line: StepLine, observed: Sequence[Observed], *, completions: int, quarantined: Collection[str]
    ) -> Findings:
        """Add a batch, show its gauges; return what is to be done."""
        self._add_teaching(line, groups=len(observed))
        now = self._clock.monotonic()
        found = self.mismatches.observe(observed, quarantined=quarantined, now=now)
        self._show_drift(tokens=line.numbers.tokens / completions)
        panel = self.mismatches.panel
        self._metrics.unmeasured_samplers.set(self.mismatches.unmeasured_samplers)
        for name in {one.sampler_id for one in observed}:
            mismatch = panel.mismatch(name)
            self._metrics.sampler_mismatch_nats.labels(name).set(mismatch.nats)
            self._metrics.sampler_mismatch_error_nats.labels(name).set(mismatch.error_nats)
            self._metrics.sampler_measured_groups.labels(name).set(panel.groups(name))
        quarantines = {name: self._why(mismatch) for name, mismatch in found.beyond.items()}
        return Findings(quarantines | dict.fromkeys(found.content, ""), found.to_score)

    def scored(self, group: Observed, scored: Scored | None, *, is_probe: bool) -> dict[str, str]:
        """Add what a group shows by the version that it names; return quarantines, as ``Findings``."""
        outcome = "out of reach" if scored is None else "misnamed" if scored.is_misnamed else "measured"
        self._metrics.scored_groups.labels(outcome).inc()
        why = self.mismatches.scored(group, scored, is_probe=is_probe)
        return {} if why is None else {group.sampler_id: why}

    def took(self, seconds: float) -> None:
        """Note how long drawn groups took to score: it is a bounded share of the time."""
        self.mismatches.took(seconds, now=self._clock.monotonic())

    def _add_teaching(self, line: StepLine, *, groups: int) -> None:
        taught = line.numbers.teaching_groups
        self._batches.append((groups, groups - taught))
        self._reward_mean = line.reward_mean
        self.idle_batches = 0 if taught else self.idle_batches + 1
        if taught:
            self._taught_at_s = self._clock.monotonic()
        if (teaching := self.teaching) is not None:
            self._metrics.uninformative_ratio.set(teaching.uninformative_groups / teaching.groups)

    def _show_drift(self, *, tokens: float) -> None:
        """Recommend a staleness bound and show drift by age; ``tokens`` are of a typical completion."""
        panel = self.mismatches.panel
        drift = panel.drift_by_age(least_groups=LEAST_GROUPS)
        self._recommended = recommended_staleness(drift, sample=self._sample, tokens=tokens)
        for age_versions in KNOTS[1:]:
            measured = drift.get(age_versions, _UNKNOWN)
            share = self._sample.share if age_versions in drift else None
            self._metrics.show_age(
                age_versions,
                drift_nats=measured.nats,
                drift_error_nats=measured.error_nats,
                expected_ess_ratio=math.nan if share is None else share(measured.nats, tokens),
            )

    def _why(self, mismatch: Estimate) -> str:
        return (
            f"its groups were {mismatch.nats:.3g} +- {mismatch.error_nats:.2g} nats a token further from the "
            f"learner than age explains (bound {self._threshold_nats:g}): its logprobs are not those of the "
            "version it names"
        )
