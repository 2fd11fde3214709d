"""Sums over the groups submitted lately: one log line for many groups; pure."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from node.rollout import RolloutGroup, Verdict

LOG_EVERY_S: Final = 30.0
"""A sampler of a small model submits tens of groups a second: each of them is an event at DEBUG."""


@dataclass(frozen=True, slots=True)
class SubmittedGroups:
    """The groups that the hub answered for within some time."""

    groups: int
    within_s: float
    verdicts: dict[str, int]
    """The hub's immediate answers."""
    tokens: int
    reward_mean: float
    oldest_version: int
    newest_version: int
    sampled_s: float
    """Mean over groups, from the start of sampling to the last token."""
    graded_s: float
    """Mean over groups, from the last token to the rewards."""
    metrics: dict[str, float]
    """What graders measured, by name: the mean over the groups that have it."""


@dataclass(slots=True)
class _Sums:
    verdicts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    reward: float = 0.0
    oldest_version: int = sys.maxsize
    newest_version: int = 0
    sampled_s: float = 0.0
    graded_s: float = 0.0
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Name -> the mean of each group."""


class GroupTally:
    """Adds groups up. ``now`` is in seconds of a monotonic clock."""

    def __init__(self, *, now: float) -> None:
        self._since_s = now
        self._sums = _Sums()

    def add(self, group: RolloutGroup, verdict: Verdict, *, now: float) -> SubmittedGroups | None:
        """Count a group; return the sums and begin again if ``LOG_EVERY_S`` have passed."""
        sums = self._sums
        sums.oldest_version = min(sums.oldest_version, group.oldest_version)
        sums.newest_version = max(sums.newest_version, group.newest_version)
        sums.verdicts[verdict.value] += 1
        sums.tokens += group.drawn_tokens
        sums.reward += group.reward_mean
        sums.sampled_s += group.sampling_finished_at_s - group.sampling_started_at_s
        sums.graded_s += group.graded_at_s - group.sampling_finished_at_s
        for name, mean in group.metric_means.items():
            sums.metrics.setdefault(name, []).append(mean)
        return self.rest(now=now) if now - self._since_s >= LOG_EVERY_S else None

    def rest(self, *, now: float) -> SubmittedGroups | None:
        """Return the sums so far, None if there are none, and begin again."""
        sums, since_s = self._sums, self._since_s
        self._sums, self._since_s = _Sums(), now
        groups = sums.verdicts.total()
        if not groups:
            return None
        return SubmittedGroups(
            groups=groups,
            within_s=round(now - since_s, 1),
            verdicts=dict(sums.verdicts),
            tokens=sums.tokens,
            reward_mean=round(sums.reward / groups, 4),
            oldest_version=sums.oldest_version,
            newest_version=sums.newest_version,
            sampled_s=round(sums.sampled_s / groups, 3),
            graded_s=round(sums.graded_s / groups, 3),
            metrics={name: round(fmean(means), 4) for name, means in sorted(sums.metrics.items())},
        )
