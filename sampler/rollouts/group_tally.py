"""Sums over the groups submitted lately: one log line for many groups; pure."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final, Self

from node.rollout import RolloutGroup, mean_metrics
from node.verdict import Verdict

LOG_EVERY_S: Final = 30.0
"""A sampler of a small model submits tens of groups a second."""


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """What is told of a group once it is submitted; the group itself is bytes by then."""

    oldest_version: int
    newest_version: int
    tokens: int
    """That the policy drew."""
    reward_mean: float
    """NaN where verifiers grade."""
    sampled_s: float
    """From the start of sampling to the last token."""
    graded_s: float
    """From there to the rewards."""
    metrics: Mapping[str, float]
    """What its grader measured: the mean of each metric."""

    @classmethod
    def of(cls, group: RolloutGroup) -> Self:
        return cls(
            group.oldest_version,
            group.newest_version,
            group.drawn_tokens,
            group.reward_mean,
            group.sampling_finished_at_s - group.sampling_started_at_s,
            group.graded_at_s - group.sampling_finished_at_s,
            group.metric_means,
        )


class GroupTally:
    """Adds groups up. ``now`` is in seconds of a monotonic clock."""

    def __init__(self, *, now: float) -> None:
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since_s = now
        self._verdicts: Counter[str] = Counter()
        self._groups: list[GroupFigures] = []

    def add(self, group: GroupFigures, verdict: Verdict, *, now: float) -> dict[str, Any] | None:
        """Count a group; return the sums and begin again if ``LOG_EVERY_S`` have passed."""
        self._verdicts[verdict.value] += 1
        self._groups.append(group)
        return self.rest(now=now) if now - self._since_s >= LOG_EVERY_S else None

    def rest(self, *, now: float) -> dict[str, Any] | None:
        """Return the sums so far, None if there are none, and begin again.

        Times are means, and ``metrics`` means over the groups that have it. Where verifiers grade, there is
        no ``reward_mean``.
        """
        totals, groups = None, self._groups
        if groups:
            reward_mean = fmean(one.reward_mean for one in groups)
            metrics = mean_metrics(one.metrics for one in groups)
            totals = {
                "groups": len(groups),
                "within_s": round(now - self._since_s, 1),
                "verdicts": dict(self._verdicts),
                "tokens": sum(one.tokens for one in groups),
                **({} if math.isnan(groups[0].reward_mean) else {"reward_mean": round(reward_mean, 4)}),
                "oldest_version": min(one.oldest_version for one in groups),
                "newest_version": max(one.newest_version for one in groups),
                "sampled_s": round(fmean(one.sampled_s for one in groups), 3),
                "graded_s": round(fmean(one.graded_s for one in groups), 3),
                "metrics": {name: round(mean, 4) for name, mean in metrics.items()},
            }
        self._begin(now)
        return totals
