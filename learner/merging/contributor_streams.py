"""Contributors' streams as the learner keeps them: what each has sent, and what it is to be told.

    contributor --hello, credits, contributions--> here --inbox--> merge_taker, between two merges
                <--terms, groups, answers--------- here <----------'

What becomes of groups and rounds is ``deals``' and ``rounds``' to say. Used on the event loop's thread.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from learner.merging.contribution import Contributed
from learner.merging.deals import Deals
from learner.merging.handed_in import HandedIn, digest_of
from learner.merging.merge_metrics import MergeMetrics
from node.errors import Reason, RefusedError
from node.serving.merge_servicer import Heard, Stream, Told
from node.system.clock import Clock
from node.values.contribution import ContributionAnswer, MergeTerms
from node.values.groups.rollout import RolloutGroup
from node.values.merging import ContributionHead, ContributorHello, GroupsTaken

REPORT_BYTES: Final = 4 << 20
"""Longest report: some 20 000 groups."""

HELD_IDS: Final = 65_536


class ContributorStream:
    """One contributor's newest stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._unsent: deque[Told] = deque()
        self._changed = asyncio.Event()
        self._ended: RefusedError | None = None
        self._is_ended = False

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    def tell(self, response: Told) -> None:
        """Send a message after those before; groups are bounded by credits, all else by contributions."""
        self._unsent.append(response)
        self._changed.set()

    def end(self, refusal: RefusedError | None = None) -> None:
        """End the stream, with a refusal if there is one."""
        self._ended, self._is_ended = self._ended or refusal, True
        self._changed.set()

    async def responses(self) -> AsyncGenerator[Told, None]:
        """Yield what is to be sent, until the end. Raises RefusedError: it ended with one."""
        while True:
            while self._unsent and not self._is_ended:
                yield self._unsent.popleft()
            if self._is_ended:
                if self._ended is not None:
                    raise self._ended
                return
            self._changed.clear()
            await self._changed.wait()


@dataclass(slots=True)
class _Incoming:
    """A contribution of which parts are on their way."""

    header: ContributionHead
    is_kept: bool
    """Whether it is new: one that is known is read and dropped."""
    payload: bytearray = field(default_factory=bytearray)
    seen_bytes: int = 0


class ContributorStreams:
    """All contributors' streams, and the contributions that have come whole and were not looked at yet."""

    def __init__(
        self,
        base_root: bytes,
        layout_digest: bytes,
        *,
        wake: Callable[[], None],
        clock: Clock,
        metrics: MergeMetrics,
    ) -> None:
        """Serve contributors of one model; ``wake`` is called when there is something to look at."""
        self._base_root = base_root
        self._layout_digest = layout_digest
        self._wake = wake
        self._clock = clock
        self._metrics = metrics
        metrics.contributors.set(0)
        self._streams: dict[str, ContributorStream] = {}
        self._incoming: dict[str, _Incoming] = {}
        self._deals: Deals | None = None
        self._was_trained: Callable[[str], bool] = lambda _: False
        self._terms = MergeTerms(b"", b"", 0)
        self._merged: dict[str, Contributed] = {}
        self._payload_limit = 0
        self.inbox: dict[str, HandedIn] = {}
        """By contributor: whole, and not looked at yet."""
        self.waiting: dict[str, HandedIn] = {}
        """Looked at and without an answer: it waits for its round."""
        self.returned: list[RolloutGroup] = []
        """Groups that a contributor which has started again no longer holds, to be dealt again."""

    def begin(
        self,
        deals: Deals,
        terms: MergeTerms,
        *,
        was_trained: Callable[[str], bool],
        merged: Iterable[Contributed],
        payload_limit: int,
    ) -> None:
        """Take contributors in from now on.

        Args:
            was_trained: as for ``Deals.connect``.
            merged: the newest contributions that were merged, to be answered as they were.
            payload_limit: bytes of the largest payload.
        """
        self._deals, self._terms, self._was_trained = deals, terms, was_trained
        self._payload_limit = payload_limit
        self._merged = {one.contributor: one for one in merged}

    def change_terms(self, terms: MergeTerms) -> None:
        """Tell everybody by what is trained from now on, if that is something else."""
        if terms != self._terms:
            self._terms = terms
            for stream in self._streams.values():
                stream.tell(terms)

    def open(self, name: str, hello: ContributorHello) -> ContributorStream:
        """Begin a contributor's newest stream; an older one ends. Raises RefusedError: why it may not."""
        if self._deals is None:
            raise RefusedError(Reason.BUSY, "the learner is starting", fix="connect again later")
        if hello.layout_digest != self._layout_digest:
            raise RefusedError(
                Reason.LAYOUT_MISMATCH,
                f"this contributor's layout digest is {hello.layout_digest.hex() or 'empty'}, the run's is "
                f"{self._layout_digest.hex()}",
                fix="give every peer the same model directory",
            )
        if hello.base_root != self._base_root:
            raise RefusedError(
                Reason.BASE_MISMATCH,
                f"version 0 of this contributor has root {hello.base_root.hex() or 'unknown'}, the run's has "
                f"{self._base_root.hex()}",
                fix="give this contributor the model directory that the learner began with",
            )
        if len(hello.held_group_ids) > HELD_IDS:
            raise RefusedError(Reason.OVER_LIMIT, f"more than {HELD_IDS} held groups")
        stream = ContributorStream(name)
        taken, returned = self._deals.connect(
            name,
            stream,
            list(hello.held_group_ids),
            was_trained=self._was_trained,
            now=self._clock.monotonic(),
        )
        if (older := self._streams.get(name)) is not None:
            older.end(RefusedError(Reason.DUPLICATE, f"a newer stream of {name} has taken over"))
        self._drop_incoming(name)
        self._streams[name] = stream
        self.returned += returned
        stream.tell(self._terms)
        if taken:
            stream.tell(GroupsTaken(tuple(taken)))
        self._changed()
        return stream

    def close(self, name: str, stream: Stream) -> None:
        """Note that a stream has ended."""
        stream.end()
        if self._streams.get(name) is stream:
            del self._streams[name]
            self._drop_incoming(name)
        if self._deals is not None:
            self._deals.disconnect(name, stream, now=self._clock.monotonic())
        self._changed()

    def hear(self, name: str, heard: Heard) -> None:
        """Take a message in. Raises RefusedError: MALFORMED or OVER_LIMIT; the stream is to end."""
        assert self._deals is not None
        match heard:
            case int():
                if heard > 0:
                    self._deals.credit(name, heard)
                self._wake()
            case ContributionHead():
                self._begin_contribution(name, heard)
            case bytes():
                self._add_part(name, heard)

    def deal(self, name: str, responses: Iterable[Told]) -> None:
        """Send groups to a contributor."""
        for response in responses:
            self._streams[name].tell(response)

    def refuse(self, name: str, number: int, detail: str, *, taken: Sequence[str]) -> None:
        """Tell a contributor that its contribution is not merged, and which other groups it no longer has."""
        self.waiting.pop(name, None)
        if taken and (stream := self._streams.get(name)) is not None:
            stream.tell(GroupsTaken(tuple(taken)))
        self._answer(name, ContributionAnswer(number=number, detail=detail[:200]))

    def answer(self, name: str, merged: Contributed) -> None:
        """Tell a contributor into which version its contribution was merged, which is durable."""
        self.waiting.pop(name, None)
        self._merged[name] = merged
        answer = ContributionAnswer(number=merged.number, merged_version=merged.version)
        self._answer(name, answer)

    def _answer(self, name: str, answer: ContributionAnswer) -> None:
        if (stream := self._streams.get(name)) is not None:
            stream.tell(answer)
        self._changed()

    def _begin_contribution(self, name: str, header: ContributionHead) -> None:
        if name in self._incoming:
            raise RefusedError(Reason.MALFORMED, "a contribution begins before the one before it has ended")
        if header.payload_bytes > self._payload_limit or len(header.report) > REPORT_BYTES:
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"a contribution of {header.payload_bytes} bytes, a report of {len(header.report)}: at most "
                f"{self._payload_limit} and {REPORT_BYTES} are read",
            )
        pending = self.inbox.get(name) or self.waiting.get(name)
        merged = self._merged.get(name)
        said = header.number, digest_of(header)
        is_merged = merged is not None and (merged.number, bytes.fromhex(merged.digest)) == said
        if pending is not None and pending.number != header.number:  # of the process before this one
            raise RefusedError(
                Reason.BUSY,
                f"contribution {header.number} comes before {pending.number} is merged",
                fix="send it again later",
            )
        if pending is not None and pending.digest != said[1]:
            raise RefusedError(Reason.MALFORMED, f"another contribution comes under number {header.number}")
        self._incoming[name] = _Incoming(header, is_kept=pending is None and not is_merged)
        if is_merged:
            assert merged is not None
            self.answer(name, merged)
        self._end_if_whole(name)

    def _add_part(self, name: str, part: bytes) -> None:
        incoming = self._incoming.get(name)
        if incoming is None or incoming.seen_bytes + len(part) > incoming.header.payload_bytes or not part:
            raise RefusedError(Reason.MALFORMED, "a part of a payload that no header speaks of")
        incoming.seen_bytes += len(part)
        if incoming.is_kept:
            incoming.payload += part
        self._metrics.received_bytes.labels(name).inc(len(part))
        self._end_if_whole(name)

    def _end_if_whole(self, name: str) -> None:
        incoming = self._incoming[name]
        if incoming.seen_bytes < incoming.header.payload_bytes:
            return
        del self._incoming[name]
        if not incoming.is_kept:
            return
        try:
            whole = HandedIn.of(name, incoming.header, bytes(incoming.payload))
        except ValueError as error:
            raise RefusedError(Reason.MALFORMED, f"contribution {incoming.header.number}: {error}") from error
        self.inbox[name] = whole
        self._changed()

    def _drop_incoming(self, name: str) -> None:
        self._incoming.pop(name, None)

    def _changed(self) -> None:
        """Show sizes, and have the training loop look."""
        self._metrics.contributors.set(len(self._streams))
        pending = [*self.inbox.values(), *self.waiting.values()]
        self._metrics.held_payload_bytes.set(sum(len(one.payload) for one in pending))
        self._wake()
