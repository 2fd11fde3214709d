"""One lane of a fetch: reads one range after the other, each from one source.

link cut, stream ended early, no byte for stall_s   continue at the byte where it stopped, or elsewhere
a frame that fails its digest                       ask for this frame alone, from its first byte
an answer nobody asked for, a wrong offset          set that source aside, continue elsewhere
nothing left to ask for                             take over what a slower source would finish late

Payloads are decoded in threads while the next are asked for and read.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from heterorl.v1 import policy_pb2
from node.errors import RefusedError
from node.rpc.channel import ConnectionLost, classified
from node.telemetry.transfer_metrics import TransferMetrics
from node.waits import wait_at_most
from node.weights.format.manifest import DamagedFrameError
from node.weights.transfer.ranges import Arrived, PutFrame, Range, Transfer
from node.weights.transfer.source_scores import Fault
from node.weights.transfer.sources import Attempts, ReadChunk, Sources
from node.wire.mapping import to_wire

logger = logging.getLogger(__name__)

_RANGE_S: Final = 0.5
"""How long a range should take a lane: several round trips, so that asking costs little, but no more, so that
frames are complete soon at each of a chain of relays."""

_GROWTH: Final = 4
"""Maximum growth from one range to the next; TCP slow start at most doubles per round trip."""

_RANGES_PER_LANE: Final = 2
"""Ranges that the rest is cut into at the end, so that all lanes end at about the same time."""

_WORTH_TAKING_S: Final = 1.0
"""A range is taken over from a slower source if that saves this much and halves the time."""

_MOST_TAKEOVERS: Final = 2
"""Most takeovers of one range: where every source waits for the same upstream, moving it gains nothing."""

_MOST_DECODED: Final = min(4, os.cpu_count() or 1)
"""Messages of one lane being decoded at a time; one more waits."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds on the effort of a fetch."""

    streams: int = 3
    """Ranges in flight per connection: it is not idle while one of them is asked for."""
    most_streams: int = 32
    """Over all sources; half of what a hub allows one peer."""
    range_bytes: int = 2 << 20
    """At most: lanes then stay near each other, and a relay has what those behind it ask for."""
    least_range_bytes: int = 256 << 10
    """Less is not worth a lane of its own."""
    part_bytes: int = 16 << 10
    """Smallest part of a frame, and a lane's first request while nothing is known of the link."""
    stall_s: float = 20.0
    attempts: int = 8
    """In a row without a byte, for each source: with the waits between about 10 s, at most 20 s."""
    longest_wait_s: float = 5.0
    """Longest wait between two attempts: another artifact may be had while this one is not."""
    attempts_per_damaged_frame: int = 3


class NotTakenError(Exception):
    """The receiver of a frame refused it; no source is to blame."""

    def __init__(self, refusal: RefusedError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


@dataclass(eq=False)
class Lane:
    """Reads ranges of a transfer, which it shares with ``lanes - 1`` others."""

    transfer: Transfer
    _: KW_ONLY
    sources: Sources
    attempts: Attempts
    arrived: Callable[[int], None]
    """Told how many bytes came."""
    metrics: TransferMetrics
    limits: FetchLimits
    lanes: int
    _decoding: deque[asyncio.Task[None]] = field(default_factory=deque, init=False)

    async def run(self) -> None:
        """Read until nothing is left of the transfer.

        Raises DamagedFrameError: a frame was damaged too often. NotTakenError: the receiver refused one.
        RefusedError, ConnectionLost: as ``Attempts``.
        """
        try:
            await self._read_ranges()
        finally:
            await asyncio.gather(*self._decoding, return_exceptions=True)

    async def _read_ranges(self) -> None:
        transfer, scores = self.transfer, self.sources.scores
        bytes_per_s: float | None = None
        asked_bytes = 0
        while True:
            transfer.changed.clear()
            self._look_at_decoding()
            if transfer.is_over:
                return
            names = self.attempts.names()
            if bytes_per_s is None:
                bytes_per_s = max((scores.bytes_per_s(name) or 0.0 for name in names), default=0.0)
            span = transfer.take(self._enough_bytes(bytes_per_s, asked_bytes)) or self._take_over(names)
            if span is None:
                await wait_at_most(transfer.changed, _WORTH_TAKING_S)
                continue
            asked_bytes = span.left_bytes(transfer.manifest)
            if span.stream is None:
                others = [name for name in names if name not in span.avoid]
                span.source = scores.choose(others or names)
            source = span.source
            try:
                bytes_per_s = await self._read(span)
                transfer.leave(span)
            except DamagedFrameError:
                raise
            except (ConnectionLost, RefusedError) as error:
                transfer.leave(span)
                if span.frames:  # else it was taken over
                    span.avoid = frozenset({source})
                    transfer.give_back(span)
                    await self.attempts.wait_after(source, error)

    def _enough_bytes(self, bytes_per_s: float, asked_bytes: int) -> int:
        """Return how much to ask for after ``asked_bytes``, at such a goodput."""
        if self.lanes == 1:
            return self.limits.range_bytes
        if not bytes_per_s:
            return self.limits.part_bytes  # so little that the first frames are complete very soon
        wanted_bytes = min(int(_RANGE_S * bytes_per_s), self.limits.range_bytes)
        # At the end half as much, but no less: that would be waiting for answers rather than reading.
        share_bytes = self.transfer.unasked.left_bytes // (_RANGES_PER_LANE * self.lanes)
        enough_bytes = min(wanted_bytes, max(share_bytes, wanted_bytes // 2))
        enough_bytes = max(enough_bytes, self.limits.least_range_bytes)
        return min(enough_bytes, _GROWTH * asked_bytes) if asked_bytes else enough_bytes

    def _take_over(self, names: Iterable[str]) -> Range | None:
        """Remove and return a range of a lane that another source would overtake; None: there is none."""
        now = time.monotonic()
        for slow in self.transfer.reading:
            known = (self.sources.scores.bytes_per_s(name) for name in names if name != slow.source)
            best = max((rate for rate in known if rate), default=None)
            read_s = now - slow.started_s
            may_be_taken = slow.frames and slow.deadline is not None and slow.times_taken < _MOST_TAKEOVERS
            if best is None or not may_be_taken or read_s < _WORTH_TAKING_S:
                continue
            left_bytes = slow.left_bytes(self.transfer.manifest)
            here_s, there_s = left_bytes * read_s / max(slow.read_bytes, 1), left_bytes / best
            if here_s - there_s > _WORTH_TAKING_S and there_s < here_s / 2:
                return self.transfer.take_over(slow)
        return None

    async def _read(self, span: Range) -> float:
        """Read one stream and return its goodput, bytes a second; 0: the source sent it unasked.

        However it ends, what arrived has left the range.
        """
        transfer = self.transfer
        request = policy_pb2.FetchFramesRequest(
            key=to_wire(policy_pb2.ArtifactKey, transfer.key),
            frames=span.frames,
            first_offset_bytes=span.next_bytes,
            end_offset_bytes=span.end_bytes,
        )
        span.started_s, span.read_bytes = time.monotonic(), 0
        pushed, span.stream = span.stream, None
        async with self.sources.chunks(span.source, request, transfer.manifest, pushed=pushed) as read:
            try:
                while span.frames:
                    chunk = await self._next(read, span)
                    data = chunk.data  # each look at the field is a copy
                    self.metrics.count_received(transfer.key, len(data))
                    self.arrived(len(data))
                    arrived = transfer.arrive(span, chunk.frame, chunk.offset_bytes, data)
                    self.attempts.reset()
                    span.read_bytes += len(data)
                    if arrived:
                        await self._begin_decoding(arrived)
            finally:
                took_s = time.monotonic() - span.started_s
                if span.read_bytes and pushed is None:  # what was pushed may have waited here for long
                    self.sources.scores.delivered(span.source, span.read_bytes, took_s=took_s)
        return span.read_bytes / max(took_s, 1e-6) if pushed is None else 0.0

    async def _next(self, read: ReadChunk, span: Range) -> Any:
        try:
            with classified():
                async with asyncio.timeout(self.limits.stall_s) as span.deadline:
                    message = await read()
        except TimeoutError:
            raise ConnectionLost(f"no byte arrived for {self.limits.stall_s:g} s") from None
        finally:
            span.deadline = None
        if not span.frames:
            raise ConnectionLost("the range was taken over")
        if not isinstance(message, policy_pb2.FetchFramesResponse | policy_pb2.AwaitArtifactResponse):
            raise ConnectionLost("the stream ended before the last frame")
        return message

    async def _begin_decoding(self, arrived: list[Arrived]) -> None:
        """Decode frames beside a few others; raise what became of those begun earlier, as ``run``."""
        self.transfer.decoding += 1
        self._decoding.append(asyncio.create_task(self._decode(arrived)))
        if len(self._decoding) > _MOST_DECODED:
            # Not awaited itself: a cancelled lane would cancel it, and its thread would outlive ``run``.
            await asyncio.wait({self._decoding[0]})
            self._look_at_decoding()

    def _look_at_decoding(self) -> None:
        ended = [task for task in self._decoding if task.done()]
        for task in ended:
            self._decoding.remove(task)
        for task in ended:
            task.result()

    async def _decode(self, arrived: list[Arrived]) -> None:
        try:
            damaged = await asyncio.to_thread(_put_all, self.transfer.put, arrived)
            for each, fault in damaged:
                self._fetch_again(each, fault)
        except DamagedFrameError:
            raise
        except RefusedError as error:
            raise NotTakenError(error) from error
        finally:
            self.transfer.decoded()

    def _fetch_again(self, each: Arrived, fault: DamagedFrameError) -> None:
        """Return a damaged frame, to be fetched elsewhere; raise ``fault`` if it was damaged too often."""
        transfer, frame = self.transfer, each.frame
        self.metrics.count_damaged_frame()
        transfer.damaged[frame] += 1
        fields = {"version": transfer.key.version, "frame": frame, "error": str(fault)}
        logger.warning("a frame arrived damaged", extra=fields)
        if len(each.senders) == 1:
            (sender,) = each.senders
            self.sources.fault(sender, Fault.DAMAGED, str(fault))
        if transfer.damaged[frame] >= self.limits.attempts_per_damaged_frame:
            raise fault
        transfer.give_back(Range(deque([frame]), avoid=each.senders))


def _put_all(put: PutFrame, arrived: list[Arrived]) -> list[tuple[Arrived, DamagedFrameError]]:
    damaged = []
    for each in arrived:
        try:
            put(each.frame, each.payload)
        except DamagedFrameError as error:
            damaged.append((each, error))
    return damaged
