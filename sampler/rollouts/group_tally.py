"""Sums over the groups submitted lately: one log line for many groups; pure."""

import math
from collections import Counter
from statistics import fmean
from typing import Any, Final, NamedTuple

from node.values.groups.rollout import RolloutGroup, mean_metrics
from node.values.groups.verdict import Verdict

LOG_EVERY_S: Final = 30.0
"""A sampler of a small model submits tens of groups a second."""


class _Figures(NamedTuple):
    """Numbers told of a group, which is bytes once it waits for the hub."""

    tokens: int
    reward_mean: float
    sampled_s: float
    graded_s: float
    oldest_version: int
    newest_version: int
    metrics: dict[str, float]


class GroupTally:
    """Adds groups up. ``now`` is in seconds of a monotonic clock."""

    def __init__(self, *, now: float) -> None:
        self._unanswered: dict[str, _Figures] = {}
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since_s = now
        self._verdicts: Counter[str] = Counter()
        self._answered: list[_Figures] = []

    def made(self, group: RolloutGroup) -> None:
        """Note a group that is about to be submitted."""
        self._unanswered[group.group_id] = _Figures(
            group.drawn_tokens,
            group.reward_mean,
            group.sampling_finished_at_s - group.sampling_started_at_s,
            group.graded_at_s - group.sampling_finished_at_s,
            group.oldest_version,
            group.newest_version,
            group.metric_means,
        )

    def answered(self, group_id: str, verdict: Verdict | None, *, now: float) -> dict[str, Any] | None:
        """Count a group, unless it was refused for good; return the sums after ``LOG_EVERY_S``."""
        figures = self._unanswered.pop(group_id)
        if verdict is None:
            return None
        self._verdicts[verdict.value] += 1
        self._answered.append(figures)
        return self.rest(now=now) if now - self._since_s >= LOG_EVERY_S else None

    def rest(self, *, now: float) -> dict[str, Any] | None:
        """Return the sums so far, None if there are none, and begin again.

        ``sampled_s`` is the mean from the start of sampling to the last token, ``graded_s`` from there to the
        rewards, and ``metrics`` what graders measured: means over the groups that have it. Where verifiers
        grade, there is no ``reward_mean``.
        """
        totals = None
        if self._answered:
            tokens, rewards, sampled_s, graded_s, oldest, newest, metrics = zip(*self._answered, strict=True)
            totals = {
                "groups": len(tokens),
                "within_s": round(now - self._since_s, 1),
                "verdicts": dict(self._verdicts),
                "tokens": sum(tokens),
                **({} if math.isnan(rewards[0]) else {"reward_mean": round(fmean(rewards), 4)}),
                "oldest_version": min(oldest),
                "newest_version": max(newest),
                "sampled_s": round(fmean(sampled_s), 3),
                "graded_s": round(fmean(graded_s), 3),
                "metrics": {name: round(mean, 4) for name, mean in mean_metrics(metrics).items()},
            }
        self._begin(now)
        return totals
