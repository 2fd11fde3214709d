"""The groups that a learner holds, from delivery to batch, or evicted, as once they are too old; pure.

    delivered --> arrived --judged--> admitted --> batch     whole groups, oldest behaviour version first
                     |                    '------> evicted   too stale to be taken now, graded by options that
                     '------> refused                        have changed, made by a sampler that was
                                                             quarantined since, or for a slot that was trained
                                                             on since, with a group that was thrown out too
                                                             late

Oldest first: newer groups can still wait. An arrived group is bytes that nobody has looked at, an admitted
one views of its bytes: held groups take the memory that they were sent in.
"""

from collections.abc import Callable, Container, Iterable, Mapping

from learner.intake.group_verdict import stale, trained_before
from node.values.groups.rollout import EncodedGroup, RolloutGroup, other_options
from node.values.groups.verdict import GroupVerdict, Verdict


class BatchBuffer:
    """Groups that wait for a step, at most ``capacity_groups``."""

    def __init__(self, *, capacity_groups: int) -> None:
        self._capacity_groups = capacity_groups
        self._arrived: dict[str, EncodedGroup] = {}
        self._admitted: dict[str, RolloutGroup] = {}
        """Both in the order of arrival."""

    def __len__(self) -> int:
        return len(self._arrived) + len(self._admitted)

    def arrive(self, group: EncodedGroup) -> None:
        """Keep a group as it was delivered.

        Raises:
            ValueError: the buffer is full or holds this group already; the coordinator's credits rule
                both out.
        """
        if group.group_id in self._arrived or group.group_id in self._admitted:
            raise ValueError(f"group {group.group_id} is buffered already")
        if len(self) >= self._capacity_groups:
            raise ValueError(f"the buffer is full with {self._capacity_groups} groups")
        self._arrived[group.group_id] = group

    @property
    def arrived(self) -> tuple[EncodedGroup, ...]:
        """Groups to judge, each with ``admit`` or ``refuse``."""
        return tuple(self._arrived.values())

    def admit(self, group: RolloutGroup) -> None:
        """Keep an arrived group for a step."""
        del self._arrived[group.group_id]
        self._admitted[group.group_id] = group

    def refuse(self, group_id: str) -> None:
        """Forget an arrived group."""
        del self._arrived[group_id]

    def evict(
        self,
        *,
        version: int,
        max_staleness_versions: int,
        task_digest: bytes | None,
        shut_out: Mapping[str, str],
        trained_group_ids: Container[str],
        since_version: int = 0,
    ) -> list[tuple[RolloutGroup, GroupVerdict]]:
        """Remove and return, with its verdict, every admitted group that cannot be trained on any more.

        Args:
            version: of the learner; groups may be too stale at it.
            task_digest: of the options that groups must be graded by; None: not told.
            shut_out: samplers whose groups are not believed any more, and why.
            trained_group_ids: groups whose slots were trained on.
            since_version: see ``stale``.
        """
        evicted = []
        for group in list(self._admitted.values()):
            if group.group_id in trained_group_ids:
                verdict: GroupVerdict | None = trained_before(group)
            else:
                verdict = _unfit(group, task_digest, shut_out) or stale(
                    group,
                    version=version,
                    max_staleness_versions=max_staleness_versions,
                    since_version=since_version,
                )
            if verdict is not None:
                del self._admitted[verdict.group_id]
                evicted.append((group, verdict))
        return evicted

    def take_batch(
        self, groups: int, *, is_wanted: Callable[[str], bool] = lambda _: True
    ) -> tuple[RolloutGroup, ...]:
        """Remove and return so many, the oldest by behaviour version and arrival; () if there are fewer.

        Args:
            is_wanted: whether a group, by its id, may be among them.
        """
        wanted = [group for group_id, group in self._admitted.items() if is_wanted(group_id)]
        if len(wanted) < groups:
            return ()
        batch = tuple(sorted(wanted, key=lambda group: group.oldest_version)[:groups])
        for group in batch:
            del self._admitted[group.group_id]
        return batch

    def take_if(self, is_wanted: Callable[[str], bool]) -> tuple[RolloutGroup, ...]:
        """Remove and return the admitted groups whose ids are wanted."""
        taken = tuple(group for group_id, group in self._admitted.items() if is_wanted(group_id))
        for group in taken:
            del self._admitted[group.group_id]
        return taken

    def put_back(self, groups: Iterable[RolloutGroup]) -> None:
        """Keep groups that were taken and not trained on, for another batch."""
        self._admitted |= {group.group_id: group for group in groups}

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._arrived or group_id in self._admitted


def _unfit(
    group: RolloutGroup, task_digest: bytes | None, shut_out: Mapping[str, str]
) -> GroupVerdict | None:
    if (why := shut_out.get(group.sampler_id)) is not None:
        return GroupVerdict(group.group_id, Verdict.SUSPECT, f"{group.sampler_id} is quarantined: {why}")
    if task_digest is not None and (what := other_options(group, task_digest)):
        return GroupVerdict(group.group_id, Verdict.FOREIGN, what)
    return None
