"""Evidence from trained batches: how much they teach, how far the policy drifts, whom to quarantine.

    batch --observe--> share that teaches; drift by age; mismatch by sampler --> staleness bound, quarantines

A group whose completions all have the same reward has no advantage: the learner consumes it and learns
nothing. Where that is so of whole batches no step is taken, and an operator has to hear of it, because KL and
effective sample size look healthy.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from learner.config import LearnerConfig
from learner.intake.divergence_panel import KNOTS, Estimate
from learner.intake.named_versions import NamedVersions, Scored
from learner.intake.recommended_staleness import LEAST_GROUPS, recommended_staleness
from learner.intake.sampler_mismatch import Found, SamplerMismatches
from learner.metrics import LearnerMetrics
from learner.objective.menu import weighed_sample
from learner.step_log import RollbackLine, StepLine
from learner.training.step_taken import StepTaken
from learner.training.work_thread import WorkThread
from node.system.clock import Clock
from node.values.groups.rollout import RolloutGroup
from node.values.run import StepReport, Teaching

RECORDED_BATCHES: Final = 64
"""Newest batches whose share of teaching groups is reported: that of one batch of a few groups jumps."""

Score = Callable[[Sequence[RolloutGroup], int], Mapping[int, Scored | None]]
"""Scores groups by a version that the first of them names, at the learner's version: by their places, None
where the words are gone; those that do not name it are left out. Blocking."""

_UNKNOWN: Final = Estimate(math.nan, math.nan)


class Evidence:
    """The record of this process; nothing of it is in a checkpoint."""

    def __init__(
        self, config: LearnerConfig, *, clock: Clock, metrics: LearnerMetrics, score: Score | None = None
    ) -> None:
        """Begin; without ``score``, earlier versions' words cannot be used, and the panel alone decides."""
        self._score = score
        self._clock = clock
        self._metrics = metrics
        self._threshold_nats = config.quarantine_mismatch_nats
        threshold_nats = config.quarantine_mismatch_nats
        named = NamedVersions(threshold_nats, random=random.random) if score else None
        self.mismatches = SamplerMismatches(threshold_nats, named=named)
        self._sample = weighed_sample(config.objective, config.objective_options)
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

    async def weigh(
        self,
        taken: StepTaken,
        batch: Sequence[RolloutGroup],
        *,
        quarantined: Collection[str],
        thread: WorkThread,
    ) -> dict[str, str]:
        """Add a batch, show its gauges; return samplers to quarantine, with the reason, "" to release one.

        Args:
            quarantined: samplers by now.
            thread: scores groups that are looked at once more.
        """
        found = self._observe(taken, batch, quarantined=quarantined)
        quarantines = {name: self._why(mismatch) for name, mismatch in found.beyond.items()}
        quarantines |= dict.fromkeys(found.content, "")
        for places in found.to_score:
            is_probe = batch[places[0]].sampler_id in quarantined
            groups = [batch[place] for place in places]
            scored = await self._scored(groups, newest=taken.line.version, is_probe=is_probe, thread=thread)
            for place, shown in scored.items():
                observed = taken.observed[places[place]]
                outcome = "out of reach" if shown is None else "misnamed" if shown.is_misnamed else "measured"
                self._metrics.scored_groups.labels(outcome).inc()
                if (why := self.mismatches.scored(observed, shown, is_probe=is_probe)) is not None:
                    quarantines[observed.sampler_id] = why
        return quarantines

    def _observe(
        self, taken: StepTaken, batch: Sequence[RolloutGroup], *, quarantined: Collection[str]
    ) -> Found:
        observed, line = taken.observed, taken.line
        self._add_teaching(line, groups=len(line.groups))
        now = self._clock.monotonic()
        found = self.mismatches.observe(observed, quarantined=quarantined, now=now)
        self._show_drift(tokens=line.numbers.tokens / sum(len(group.completions) for group in batch))
        panel = self.mismatches.panel
        self._metrics.unmeasured_samplers.set(self.mismatches.unmeasured_samplers)
        for name in {one.sampler_id for one in observed}:
            mismatch = panel.mismatch(name)
            self._metrics.sampler_mismatch_nats.labels(name).set(mismatch.nats)
            self._metrics.sampler_mismatch_error_nats.labels(name).set(mismatch.error_nats)
            self._metrics.sampler_measured_groups.labels(name).set(panel.groups(name))
        return found

    async def _scored(
        self, groups: Sequence[RolloutGroup], *, newest: int, is_probe: bool, thread: WorkThread
    ) -> Mapping[int, Scored | None]:
        score, started_s = self._score, self._clock.monotonic()
        scored = {} if score is None else await thread.do(lambda: score(groups, newest))
        if not is_probe:  # how long drawn groups take is a bounded share of the time
            now = self._clock.monotonic()
            self.mismatches.took(now - started_s, now=now)
        return scored

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
