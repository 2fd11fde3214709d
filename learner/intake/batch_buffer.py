"""Which groups the next step takes; pure.

    admitted --> buffered --> batch      whole groups, oldest behaviour version first
                    '-------> evicted    too stale to be taken now, graded by options that have changed, made
                                         by a sampler that was quarantined since, or for a slot that was
                                         trained on since, with a group that was thrown out too late

Oldest first: newer groups can still wait.
"""

from collections.abc import Container, Mapping

from learner.intake.group_verdict import stale, trained_before
from node.rollout import RolloutGroup, other_options
from node.verdict import GroupVerdict, Verdict


class BatchBuffer:
    """Admitted groups that wait for a step, at most ``capacity_groups``.

    Raises:
        ValueError: the capacity is below one batch, which could then never fill.
    """

    def __init__(self, *, capacity_groups: int, batch_groups: int, max_staleness_versions: int) -> None:
        if not 1 <= batch_groups <= capacity_groups:
            raise ValueError(f"a buffer of {capacity_groups} groups never fills a batch of {batch_groups}")
        self._capacity_groups = capacity_groups
        self._batch_groups = batch_groups
        self._max_staleness_versions = max_staleness_versions
        self._waiting: dict[str, RolloutGroup] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, group: RolloutGroup) -> None:
        """Keep an admitted group.

        Raises:
            ValueError: the buffer is full or holds this group already; the coordinator's credits rule
                both out.
        """
        if group.group_id in self._waiting:
            raise ValueError(f"group {group.group_id} is buffered already")
        if len(self._waiting) == self._capacity_groups:
            raise ValueError(f"the buffer is full with {self._capacity_groups} groups")
        self._waiting[group.group_id] = group

    def evict(
        self,
        *,
        version: int,
        task_digest: bytes | None,
        shut_out: Mapping[str, str],
        trained_group_ids: Container[str],
        since_version: int = 0,
    ) -> list[tuple[RolloutGroup, GroupVerdict]]:
        """Remove and return, with its verdict, every group that cannot be trained on any more.

        Args:
            version: of the learner; groups may be too stale at it.
            task_digest: of the options that groups must be graded by; None: not told.
            shut_out: samplers whose groups are not believed any more, and why.
            trained_group_ids: groups whose slots were trained on.
            since_version: see ``stale``.
        """
        evicted = []
        for group in list(self._waiting.values()):
            if group.group_id in trained_group_ids:
                verdict: GroupVerdict | None = trained_before(group)
            else:
                verdict = self._unfit(group, version, task_digest, shut_out, since_version)
            if verdict is not None:
                del self._waiting[verdict.group_id]
                evicted.append((group, verdict))
        return evicted

    def take_batch(self) -> tuple[RolloutGroup, ...]:
        """Remove and return the oldest whole batch, by behaviour version and arrival; () if none is full."""
        if len(self._waiting) < self._batch_groups:
            return ()
        by_version = sorted(self._waiting.values(), key=lambda group: group.oldest_version)
        batch = tuple(by_version[: self._batch_groups])
        for group in batch:
            del self._waiting[group.group_id]
        return batch

    def _unfit(
        self,
        group: RolloutGroup,
        version: int,
        task_digest: bytes | None,
        shut_out: Mapping[str, str],
        since_version: int,
    ) -> GroupVerdict | None:
        if (why := shut_out.get(group.sampler_id)) is not None:
            return GroupVerdict(group.group_id, Verdict.SUSPECT, f"{group.sampler_id} is quarantined: {why}")
        if task_digest is not None and (what := other_options(group, task_digest)):
            return GroupVerdict(group.group_id, Verdict.FOREIGN, what)
        bound = self._max_staleness_versions
        return stale(group, version=version, max_staleness_versions=bound, since_version=since_version)
