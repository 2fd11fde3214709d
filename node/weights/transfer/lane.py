"""One lane of a fetch: reads one range after the other, each from one source.

link cut, stream ended early, no byte for stall_s   continue at the byte where it stopped, or elsewhere
a frame that fails its digest                       ask for this frame alone, from its first byte
an answer nobody asked for, a wrong offset          set that source aside, continue elsewhere
a range that took longer than slow_s                set that source aside, if there are others
a range that is not here after stall_s              the same, and continue elsewhere where it stopped

Payloads are decoded in threads while the next are asked for and read.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from heterorl.v1 import policy_pb2
from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost, classified
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.format.manifest import DamagedFrameError
from node.weights.transfer.attempts import Attempts
from node.weights.transfer.ranges import Arrived, PutFrame, Range, Transfer
from node.weights.transfer.source_turns import Fault
from node.weights.transfer.sources import ReadChunk, Sources
from node.wire.mapping import to_wire

logger = logging.getLogger(__name__)

_RANGE_S: Final = 0.5
"""How long a range should take a lane: several round trips, so that asking costs little, but no more, so that
frames are complete soon at each of a chain of relays."""

_GROWTH: Final = 4
"""Maximum growth from one range to the next; TCP slow start at most doubles per round trip."""

_RANGES_PER_LANE: Final = 2
"""Ranges that the rest is cut into at the end, so that all lanes end at about the same time."""

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
    slow_s: float = 2.0
    """A range is to take half a second. Only one of a source below 8 KiB/s a lane, or whose rate fell by so
    much meanwhile, takes longer."""
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
    metrics: TransferMetrics
    limits: FetchLimits
    lanes: int
    slow_s: float
    """How long a range may take before its source is set aside."""
    bytes_per_s: float = 0.0
    """Goodput of the last range; before the first as it is to be expected. 0: not known."""
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
        transfer, asked_bytes = self.transfer, 0
        while True:
            transfer.changed.clear()
            self._look_at_decoding()
            if transfer.is_over:
                return
            names = self.attempts.names()
            span = transfer.take(self._enough_bytes(asked_bytes, is_only=len(names) == 1))
            if span is None:
                await transfer.changed.wait()
                continue
            asked_bytes = span.left_bytes(transfer.manifest)
            if span.stream is None:
                others = [name for name in names if name not in span.avoid]
                span.source = self.sources.turns.next_of(others or names)
            source = span.source
            try:
                await self._read(span, can_leave=self._can_leave(source, names))
                transfer.leave(span)
            except DamagedFrameError:
                raise
            except (ConnectionLost, RefusedError) as error:
                transfer.leave(span)
                if span.frames:
                    span.avoid = frozenset({source})
                    transfer.give_back(span)
                await self.attempts.wait_after(source, error)

    def _can_leave(self, source: str, names: Iterable[str]) -> bool:
        """Return whether a range could be read from elsewhere; a hub stands in for its bucket."""
        others = (name for name in names if name != source)
        return self.sources.is_bucket(source) or any(map(self.sources.is_standing, others))

    def _enough_bytes(self, asked_bytes: int, *, is_only: bool) -> int:
        """Return how much to ask for after ``asked_bytes``; ``is_only``: there is one source."""
        if self.lanes == 1:
            return self.limits.range_bytes
        if not self.bytes_per_s:
            return self.limits.part_bytes  # so little that the first frames are complete very soon
        wanted_bytes = min(int(_RANGE_S * self.bytes_per_s), self.limits.range_bytes)
        # At the end half as much, but no less: that would be waiting for answers rather than reading.
        share_bytes = self.transfer.unasked.left_bytes // (_RANGES_PER_LANE * self.lanes)
        enough_bytes = min(wanted_bytes, max(share_bytes, wanted_bytes // 2))
        # A slow one of several sources would be waited for at the end.
        least_bytes = self.limits.least_range_bytes
        least_bytes = least_bytes if is_only else max(min(least_bytes, wanted_bytes), self.limits.part_bytes)
        enough_bytes = max(enough_bytes, least_bytes)
        return min(enough_bytes, _GROWTH * asked_bytes) if asked_bytes else enough_bytes

    async def _read(self, span: Range, *, can_leave: bool) -> None:
        """Read one stream. However it ends, what arrived has left the range.

        Raises ConnectionLost: it was cut, or no byte came for ``stall_s``; with ``can_leave`` also where the
        range is not here by then.
        """
        transfer = self.transfer
        request = policy_pb2.FetchFramesRequest(
            key=to_wire(policy_pb2.ArtifactKey, transfer.key),
            frames=span.frames,
            first_offset_bytes=span.next_bytes,
            end_offset_bytes=span.end_bytes,
            came_damaged=span.came_damaged,
        )
        began_s, read_bytes = time.monotonic(), 0
        pushed, span.stream = span.stream, None
        async with self.sources.chunks(span.source, request, transfer.manifest, pushed=pushed) as read:
            while span.frames:
                waits_s = self.limits.stall_s - (time.monotonic() - began_s if can_leave else 0.0)
                chunk = await self._next(read, waits_s=waits_s)
                data = chunk.data  # each look at the field is a copy
                self.metrics.count_received(transfer.key, len(data))
                arrived = transfer.arrive(span, chunk.frame, chunk.offset_bytes, data)
                self.attempts.reset()
                read_bytes += len(data)
                if arrived:
                    await self._begin_decoding(arrived)
        took_s = time.monotonic() - began_s
        if pushed is not None:  # it may have waited here for long
            return
        self.bytes_per_s = read_bytes / max(took_s, 1e-6)
        # A hub stands in for a bucket that is away, not for one that is slow: its uplink is everybody's.
        if took_s <= self.slow_s or not can_leave or self.sources.is_bucket(span.source):
            self.sources.turns.delivered(span.source)
        elif self.sources.is_standing(span.source):
            self.sources.fault(span.source, Fault.SLOW, f"{read_bytes} bytes took {took_s:.3g} s")

    async def _next(self, read: ReadChunk, *, waits_s: float) -> Any:
        try:
            with classified():
                async with asyncio.timeout(waits_s):
                    message = await read()
        except TimeoutError:
            raise ConnectionLost(
                f"the range is not here {self.limits.stall_s:g} s after it was due"
            ) from None
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
        transfer.give_back(Range(deque([frame]), avoid=each.senders, came_damaged=True))


def _put_all(put: PutFrame, arrived: list[Arrived]) -> list[tuple[Arrived, DamagedFrameError]]:
    damaged = []
    for each in arrived:
        try:
            put(each.frame, each.payload)
        except DamagedFrameError as error:
            damaged.append((each, error))
    return damaged
