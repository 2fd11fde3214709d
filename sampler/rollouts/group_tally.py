"""Sums over the groups submitted lately: one log line for many groups; pure."""

import math
from collections import Counter
from statistics import fmean
from typing import Any, Final

from node.rollout import RolloutGroup, mean_metrics
from node.verdict import Verdict

LOG_EVERY_S: Final = 30.0
"""A sampler of a small model submits tens of groups a second."""


class GroupTally:
    """Adds groups up. ``now`` is in seconds of a monotonic clock."""

    def __init__(self, *, now: float) -> None:
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since_s = now
        self._verdicts: Counter[str] = Counter()
        self._versions: set[int] = set()
        self._rows: list[tuple[int, float, float, float]] = []
        """Tokens, reward, seconds of sampling and of grading of each group."""
        self._metrics: list[dict[str, float]] = []

    def add(self, group: RolloutGroup, verdict: Verdict, *, now: float) -> dict[str, Any] | None:
        """Count a group; return the sums and begin again if ``LOG_EVERY_S`` have passed."""
        self._verdicts[verdict.value] += 1
        self._versions |= {group.oldest_version, group.newest_version}
        sampled_s = group.sampling_finished_at_s - group.sampling_started_at_s
        graded_s = group.graded_at_s - group.sampling_finished_at_s
        self._rows.append((group.drawn_tokens, group.reward_mean, sampled_s, graded_s))
        self._metrics.append(group.metric_means)
        return self.rest(now=now) if now - self._since_s >= LOG_EVERY_S else None

    def rest(self, *, now: float) -> dict[str, Any] | None:
        """Return the sums so far, None if there are none, and begin again.

        ``sampled_s`` is the mean from the start of sampling to the last token, ``graded_s`` from there to the
        rewards, and ``metrics`` what graders measured: means over the groups that have it. Where verifiers
        grade, there is no ``reward_mean``.
        """
        totals = None
        if self._rows:
            tokens, rewards, sampled_s, graded_s = zip(*self._rows, strict=True)
            totals = {
                "groups": len(self._rows),
                "within_s": round(now - self._since_s, 1),
                "verdicts": dict(self._verdicts),
                "tokens": sum(tokens),
                **({} if math.isnan(rewards[0]) else {"reward_mean": round(fmean(rewards), 4)}),
                "oldest_version": min(self._versions),
                "newest_version": max(self._versions),
                "sampled_s": round(fmean(sampled_s), 3),
                "graded_s": round(fmean(graded_s), 3),
                "metrics": {name: round(mean, 4) for name, mean in mean_metrics(self._metrics).items()},
            }
        self._begin(now)
        return totals
