"""Which groups the next step takes; pure.

    admitted --> buffered --> batch      whole groups, oldest behaviour version first
                    '-------> evicted    too stale to be taken now

Oldest first, because a group only grows staler: the newer ones can still wait.
"""

import itertools

from learner.intake.group_verdict import Judged, stale
from node.rollout import DeliveredGroup


class BatchBuffer:
    """Groups that wait for a step, at most ``capacity_groups``.

    Raises:
        ValueError: the capacity is below one batch, which could then never fill.
    """

    def __init__(self, *, capacity_groups: int, batch_groups: int, max_staleness_versions: int) -> None:
        if not 1 <= batch_groups <= capacity_groups:
            raise ValueError(f"a buffer of {capacity_groups} groups never fills a batch of {batch_groups}")
        self._capacity_groups = capacity_groups
        self._batch_groups = batch_groups
        self._max_staleness_versions = max_staleness_versions
        self._arrivals = itertools.count()
        self._waiting: dict[str, tuple[int, int, DeliveredGroup]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, delivered: DeliveredGroup) -> None:
        """Keep an admitted group.

        Raises:
            ValueError: the buffer is full or holds this group already; the credits given to the
                hub rule both out.
        """
        group_id = delivered.group.group_id
        if group_id in self._waiting:
            raise ValueError(f"group {group_id} is buffered already")
        if len(self._waiting) == self._capacity_groups:
            raise ValueError(f"the buffer is full with {self._capacity_groups} groups")
        self._waiting[group_id] = (delivered.group.oldest_version, next(self._arrivals), delivered)

    def evict_stale(self, version: int) -> list[tuple[DeliveredGroup, Judged]]:
        """Give up, with the verdict, every group whose staleness is beyond the bound at ``version``."""
        evicted = []
        for group_id, (_, _, delivered) in list(self._waiting.items()):
            judged = stale(
                delivered.group, version=version, max_staleness_versions=self._max_staleness_versions
            )
            if judged is not None:
                del self._waiting[group_id]
                evicted.append((delivered, judged))
        return evicted

    def take_batch(self) -> tuple[DeliveredGroup, ...]:
        """Give the oldest whole batch, ordered by behaviour version and arrival; empty if none is full."""
        if len(self._waiting) < self._batch_groups:
            return ()
        oldest = sorted(self._waiting.values(), key=lambda entry: entry[:2])[: self._batch_groups]
        for _, _, delivered in oldest:
            del self._waiting[delivered.group.group_id]
        return tuple(delivered for _, _, delivered in oldest)
