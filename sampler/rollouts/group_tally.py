"""Sums over the groups submitted lately: one log line for many groups; pure."""

from collections import Counter
from statistics import fmean
from typing import Any, Final

from node.rollout import RolloutGroup, Verdict

LOG_EVERY_S: Final = 30.0
"""A sampler of a small model submits tens of groups a second."""


class GroupTally:
    """Adds groups up. ``now`` is in seconds of a monotonic clock."""

    def __init__(self, *, now: float) -> None:
        self._since_s = now
        self._clear()

    def add(self, group: RolloutGroup, verdict: Verdict, *, now: float) -> dict[str, Any] | None:
        """Count a group; return the sums and begin again if ``LOG_EVERY_S`` have passed."""
        self._verdicts[verdict.value] += 1
        self._versions |= {group.oldest_version, group.newest_version}
        self._tokens += group.drawn_tokens
        measured = {
            "reward_mean": group.reward_mean,
            "sampled_s": group.sampling_finished_at_s - group.sampling_started_at_s,
            "graded_s": group.graded_at_s - group.sampling_finished_at_s,
        }
        for values, of_group in ((self._means, measured), (self._metrics, group.metric_means)):
            for name, value in of_group.items():
                values.setdefault(name, []).append(value)
        return self.rest(now=now) if now - self._since_s >= LOG_EVERY_S else None

    def rest(self, *, now: float) -> dict[str, Any] | None:
        """Return the sums so far, None if there are none, and begin again.

        ``sampled_s`` is the mean from the start of sampling to the last token, ``graded_s`` from there to the
        rewards, and ``metrics`` what graders measured: means over the groups that have it.
        """
        if not self._verdicts:
            self._since_s = now
            return None
        totals = {
            "groups": self._verdicts.total(),
            "within_s": round(now - self._since_s, 1),
            "verdicts": dict(self._verdicts),
            "tokens": self._tokens,
            "reward_mean": round(fmean(self._means["reward_mean"]), 4),
            "oldest_version": min(self._versions),
            "newest_version": max(self._versions),
            "sampled_s": round(fmean(self._means["sampled_s"]), 3),
            "graded_s": round(fmean(self._means["graded_s"]), 3),
            "metrics": {name: round(fmean(means), 4) for name, means in sorted(self._metrics.items())},
        }
        self._since_s = now
        self._clear()
        return totals

    def _clear(self) -> None:
        self._verdicts: Counter[str] = Counter()
        self._versions: set[int] = set()
        self._tokens = 0
        self._means: dict[str, list[float]] = {}
        self._metrics: dict[str, list[float]] = {}
