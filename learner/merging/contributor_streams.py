"""Contributors' streams as the learner keeps them: what each has sent, and what it is to be told.

    contributor --hello, credits, contributions--> here --pending--> merge_taker, between two merges
                <--terms, groups, answers--------- here <------------'

What becomes of groups and rounds is ``deals``' and ``rounds``' to say. Used on the event loop's thread.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from learner.merging.contribution import Contributed, ContributionReport
from learner.merging.deals import Deals
from learner.merging.merge_metrics import MergeMetrics
from node.errors import Reason, RefusedError
from node.serving.merge_servicer import ContributorStream
from node.system.clock import Clock
from node.values.contribution import (
    Contribution,
    ContributionAnswer,
    GroupsTaken,
    MergeTerms,
    ToContributor,
)
from node.values.groups.rollout import RolloutGroup

REPORT_BYTES: Final = 4 << 20
"""Longest report: some 20 000 groups."""


class ContributorStreams:
    """All contributors' streams, and their contributions that have no answer."""

    def __init__(
        self,
        deals: Deals,
        terms: MergeTerms,
        *,
        was_trained: Callable[[str], bool],
        merged: Iterable[Contributed],
        payload_limit: int,
        wake: Callable[[], None],
        clock: Clock,
        metrics: MergeMetrics,
    ) -> None:
        """Begin without streams.

        Args:
            was_trained: as for ``Deals.connect``.
            merged: the newest contributions that were merged, to be answered as they were.
            payload_limit: bytes of the largest payload.
            wake: called when there is something to look at.
        """
        self._deals = deals
        self._terms = terms
        self._was_trained = was_trained
        self._merged = {one.contributor: one for one in merged}
        self._payload_limit = payload_limit
        self._wake = wake
        self._clock = clock
        self._metrics = metrics
        metrics.contributors.set(0)
        self._streams: dict[str, ContributorStream] = {}
        self.pending: dict[str, Contribution] = {}
        """By contributor: whole, and without an answer."""
        self.returned: list[RolloutGroup] = []
        """Groups that a contributor which has started again no longer holds, to be dealt again."""

    @property
    def version_groups(self) -> int:
        """As ``Deals.version_groups``."""
        return self._deals.version_groups

    def change_terms(self, terms: MergeTerms) -> None:
        """Tell everybody by what is trained from now on, if that is something else."""
        if terms != self._terms:
            self._terms = terms
            for stream in self._streams.values():
                stream.tell(terms)

    def open(self, name: str, stream: ContributorStream, held_group_ids: tuple[str, ...]) -> None:
        """Begin a contributor's newest stream.

        Raises:
            RefusedError: BUSY; as ``Deals.connect``, or a process that has started again does not have the
                groups of a contribution which its predecessor has sent: that is to be looked at first.
        """
        now = self._clock.monotonic()
        is_unread = name in self.pending and not self._deals.handed_in(name)
        if is_unread and self._deals.unsaid(name, held_group_ids):
            raise RefusedError(
                Reason.BUSY,
                f"contribution {self.pending[name].number} of {name}, sent before its start, is not read yet",
                fix="connect again later",
            )
        taken, returned = self._deals.connect(
            name, stream, held_group_ids, was_trained=self._was_trained, now=now
        )
        if (older := self._streams.get(name)) is not None:
            older.end(RefusedError(Reason.DUPLICATE, f"a newer stream of {name} has taken over"))
        self._streams[name] = stream
        self.returned += returned
        stream.tell(self._terms)
        if taken:
            stream.tell(GroupsTaken(taken))
        self._changed()

    def close(self, name: str, stream: ContributorStream) -> None:
        """Note that a stream has ended."""
        stream.end()
        if self._streams.get(name) is stream:
            del self._streams[name]
        self._deals.disconnect(name, stream, now=self._clock.monotonic())
        self._changed()

    def end(self, name: str, refusal: RefusedError) -> None:
        """Forget a contribution, and end its sender's stream over it."""
        del self.pending[name]
        if (stream := self._streams.get(name)) is not None:
            stream.end(refusal)

    def shut_out(self, name: str) -> bool:
        """End a revoked contributor's stream, and forget its contribution; return whether there was one."""
        if (stream := self._streams.get(name)) is not None:
            stream.end(RefusedError(Reason.REVOKED, f"{name} was revoked"))
        had_one = self.pending.pop(name, None) is not None
        self._changed()
        return had_one

    def credit(self, name: str, groups: int) -> None:
        """Note that a contributor has room for more groups."""
        if groups > 0:
            self._deals.credit(name, groups)
        self._wake()

    def is_new(self, name: str, head: Contribution, *, payload_bytes: int) -> bool:
        """Whether a contribution is to be read; a known one is answered as it was. As ``MergeDesk``."""
        if not 0 <= payload_bytes <= self._payload_limit or len(head.report) > REPORT_BYTES:
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"a contribution of {payload_bytes} bytes, a report of {len(head.report)}: at most "
                f"{self._payload_limit} and {REPORT_BYTES} are read",
            )
        pending, merged = self.pending.get(name), self._merged.get(name)
        if pending is None:
            if merged is None or (merged.number, merged.digest) != (head.number, head.digest.hex()):
                return True
            self._tell(name, _answer_of(merged))
            # Those that taught nothing may not have been told of before the learner was killed.
            group_ids = (one.group_id for one in ContributionReport.of_json(head.report).groups)
            self.returned += self._deals.give_back(name, group_ids)
        elif pending.number != head.number:  # of the process before this one
            raise RefusedError(
                Reason.BUSY,
                f"contribution {head.number} comes before {pending.number} is merged",
                fix="send it again later",
            )
        elif pending.digest != head.digest:
            raise RefusedError(Reason.MALFORMED, f"another contribution comes under number {head.number}")
        return False

    def hand_in(self, name: str, contribution: Contribution) -> None:
        """Keep a new contribution to be looked at."""
        self.pending[name] = contribution
        self._metrics.received_bytes.labels(name).inc(len(contribution.payload))
        self._changed()

    def deal(self, name: str, groups: Iterable[ToContributor]) -> None:
        """Send groups to a contributor, if it is connected."""
        if (stream := self._streams.get(name)) is not None:
            stream.tell(*groups)

    def take_back(self, name: str, group_ids: Sequence[str]) -> None:
        """Tell a contributor which groups it no longer has."""
        self._tell(name, GroupsTaken(tuple(group_ids)))

    def refuse(self, name: str, detail: str, *, taken: Sequence[str]) -> None:
        """Tell a contributor that its contribution is not merged, and which groups it no longer has."""
        number = self.pending.pop(name).number
        if taken:
            self.take_back(name, taken)
        self._tell(name, ContributionAnswer(number, detail=detail[:200]))

    def answer(self, name: str, merged: Contributed) -> None:
        """Tell a contributor into which version its contribution was merged, which is durable."""
        del self.pending[name]
        self._merged[name] = merged
        self._tell(name, _answer_of(merged))

    def _tell(self, name: str, told: ToContributor) -> None:
        if (stream := self._streams.get(name)) is not None:
            stream.tell(told)
        self._changed()

    def _changed(self) -> None:
        """Show sizes, and have the training loop look."""
        self._metrics.contributors.set(len(self._streams))
        self._metrics.held_payload_bytes.set(sum(len(one.payload) for one in self.pending.values()))
        self._wake()


def _answer_of(merged: Contributed) -> ContributionAnswer:
    return ContributionAnswer(merged.number, merged.version)
