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
from dataclasses import dataclass
from typing import Any, Final

from heterorl.v1 import policy_pb2
from node.errors import RefusedError
from node.rpc.channel import ConnectionLost, classified
from node.telemetry.transfer_metrics import TransferMetrics
from node.waits import wait_at_most
from node.weights.assembly.apply import DamagedFrameError
from node.weights.transfer.attempts import ATTEMPTS, LONGEST_WAIT_S, Attempts
from node.weights.transfer.ranges import Arrived, ChunkStream, PutFrame, Range, Transfer
from node.weights.transfer.source_scores import Fault
from node.weights.transfer.sources import Sources
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
    attempts: int = ATTEMPTS
    longest_wait_s: float = LONGEST_WAIT_S
    attempts_per_damaged_frame: int = 3


class Lane:
    """Reads ranges of a transfer, which it shares with the other lanes."""

    def __init__(
        self,
        transfer: Transfer,
        *,
        sources: Sources,
        attempts: Attempts,
        arrived: Callable[[int], None],
        metrics: TransferMetrics,
        limits: FetchLimits,
        lanes: int,
    ) -> None:
        """Read for ``transfer``, of which there are ``lanes``; ``arrived`` is told how many bytes came."""
        self._transfer = transfer
        self._sources = sources
        self._attempts = attempts
        self._arrived = arrived
        self._metrics = metrics
        self._limits = limits
        self._lanes = lanes
        self._queue = DecodeQueue(
            transfer, sources=sources, metrics=metrics, most_attempts=limits.attempts_per_damaged_frame
        )

    async def run(self) -> None:
        """Read until nothing is left of the transfer.

        Raises DamagedFrameError, NotTakenError: as ``DecodeQueue.begin``. RefusedError, ConnectionLost: as
        ``Attempts``.
        """
        try:
            await self._read_ranges()
        finally:
            await self._queue.end()

    async def _read_ranges(self) -> None:
        transfer = self._transfer
        bytes_per_s: float | None = None
        asked_bytes = 0
        while True:
            transfer.changed.clear()
            self._queue.look()
            if transfer.is_over:
                return
            names = self._attempts.names()
            if bytes_per_s is None:
                bytes_per_s = max(
                    (self._sources.scores.bytes_per_s(name) or 0.0 for name in names), default=0.0
                )
            span = transfer.take(self._enough_bytes(bytes_per_s, asked_bytes)) or self._take_over(names)
            if span is None:
                await wait_at_most(transfer.changed, _WORTH_TAKING_S)
                continue
            asked_bytes = span.left_bytes(transfer.manifest)
            if span.stream is None:
                others = [name for name in names if name not in span.avoid]
                span.source = self._sources.scores.choose(others or names)
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
                    await self._attempts.wait_after(source, error)

    def _enough_bytes(self, bytes_per_s: float, asked_bytes: int) -> int:
        """Return how much to ask for after ``asked_bytes``, at such a goodput."""
        if self._lanes == 1:
            return self._limits.range_bytes
        if not bytes_per_s:
            return self._limits.part_bytes  # so little that the first frames are complete very soon
        wanted_bytes = min(int(_RANGE_S * bytes_per_s), self._limits.range_bytes)
        # At the end half as much, but no less: that would be waiting for answers rather than reading.
        share_bytes = self._transfer.unasked.left_bytes // (_RANGES_PER_LANE * self._lanes)
        enough_bytes = min(wanted_bytes, max(share_bytes, wanted_bytes // 2))
        enough_bytes = max(enough_bytes, self._limits.least_range_bytes)
        return min(enough_bytes, _GROWTH * asked_bytes) if asked_bytes else enough_bytes

    def _take_over(self, names: Iterable[str]) -> Range | None:
        """Remove and return a range of a lane that another source would overtake; None: there is none."""
        now = time.monotonic()
        for slow in self._transfer.reading:
            known = (self._sources.scores.bytes_per_s(name) for name in names if name != slow.source)
            best = max((rate for rate in known if rate), default=None)
            read_s = now - slow.started_s
            may_be_taken = slow.frames and slow.deadline is not None and slow.times_taken < _MOST_TAKEOVERS
            if best is None or not may_be_taken or read_s < _WORTH_TAKING_S:
                continue
            left_bytes = slow.left_bytes(self._transfer.manifest)
            here_s, there_s = left_bytes * read_s / max(slow.read_bytes, 1), left_bytes / best
            if here_s - there_s > _WORTH_TAKING_S and there_s < here_s / 2:
                return self._transfer.take_over(slow)
        return None

    async def _read(self, span: Range) -> float:
        """Read one stream and return its goodput, bytes a second; 0: the source sent it unasked.

        However it ends, what arrived has left the range, or is in its ``partial``.
        """
        transfer = self._transfer
        request = policy_pb2.FetchFramesRequest(
            key=to_wire(policy_pb2.ArtifactKey, transfer.key),
            frames=span.frames,
            first_offset_bytes=span.next_bytes,
            end_offset_bytes=span.end_bytes,
        )
        span.started_s, span.read_bytes = time.monotonic(), 0
        pushed, span.stream = span.stream, None
        with self._sources.lane(span.source) as stub:
            stream: ChunkStream = pushed or stub.FetchFrames(request)
            try:
                while span.frames:
                    chunk = await self._next(stream, span)
                    data = chunk.data  # each look at the field is a copy
                    self._metrics.count_received(transfer.key, len(data))
                    self._arrived(len(data))
                    taken = span.take(chunk.frame, chunk.offset_bytes, data, transfer.manifest)
                    self._attempts.reset()
                    span.read_bytes += len(data)
                    if arrived := transfer.whole(taken):
                        await self._queue.begin(arrived)
            finally:
                stream.cancel()
                took_s = time.monotonic() - span.started_s
                if span.read_bytes and pushed is None:  # what was pushed may have waited here for long
                    self._sources.scores.delivered(span.source, span.read_bytes, took_s=took_s)
        return span.read_bytes / max(took_s, 1e-6) if pushed is None else 0.0

    async def _next(self, stream: ChunkStream, span: Range) -> Any:
        try:
            with classified():
                async with asyncio.timeout(self._limits.stall_s) as span.deadline:
                    message = await stream.read()
        except TimeoutError:
            raise ConnectionLost(f"no byte arrived for {self._limits.stall_s:g} s") from None
        finally:
            span.deadline = None
        if not span.frames:
            raise ConnectionLost("the range was taken over")
        if not isinstance(message, policy_pb2.FetchFramesResponse | policy_pb2.AwaitArtifactResponse):
            raise ConnectionLost("the stream ended before the last frame")
        return message


class NotTakenError(Exception):
    """The receiver of a frame refused it; no source is to blame."""

    def __init__(self, refusal: RefusedError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class DecodeQueue:
    """Payloads that one lane has read and not yet decoded.

    A payload that fails its digest goes back to the transfer, to be fetched from another source.
    """

    def __init__(
        self, transfer: Transfer, *, sources: Sources, metrics: TransferMetrics, most_attempts: int
    ) -> None:
        """Hand payloads to ``transfer.put``; give up when one frame was damaged ``most_attempts`` times."""
        self._transfer = transfer
        self._sources = sources
        self._metrics = metrics
        self._most_attempts = most_attempts
        self._under_way: deque[asyncio.Task[None]] = deque()

    async def begin(self, arrived: list[Arrived]) -> None:
        """Begin to decode frames, beside a few others.

        Raises DamagedFrameError: a frame that was begun earlier was damaged too often. NotTakenError: the
        receiver refused one.
        """
        self._transfer.decoding += 1
        self._under_way.append(asyncio.create_task(self._decode(arrived)))
        if len(self._under_way) > _MOST_DECODED:
            # Not awaited itself: a cancelled lane would cancel it, and its thread would outlive ``end``.
            await asyncio.wait({self._under_way[0]})
            self.look()

    def look(self) -> None:
        """Forget the tasks that have ended. Raises DamagedFrameError, NotTakenError: as ``begin``."""
        ended = [task for task in self._under_way if task.done()]
        for task in ended:
            self._under_way.remove(task)
        for task in ended:
            task.result()

    async def end(self) -> None:
        """Wait until nothing is being decoded; ignore what was raised."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _decode(self, arrived: list[Arrived]) -> None:
        try:
            await self._put(arrived)
        finally:
            self._transfer.decoded()

    async def _put(self, arrived: list[Arrived]) -> None:
        try:
            damaged = await asyncio.to_thread(_put_all, self._transfer.put, arrived)
        except RefusedError as error:
            raise NotTakenError(error) from error
        for each, fault in damaged:
            frame = each.frame
            self._metrics.count_damaged_frame()
            self._transfer.damaged[frame] += 1
            logger.warning(
                "a frame arrived damaged",
                extra={"version": self._transfer.key.version, "frame": frame, "error": str(fault)},
            )
            if len(each.senders) == 1:
                (sender,) = each.senders
                self._sources.fault(sender, Fault.DAMAGED, str(fault))
            if self._transfer.damaged[frame] >= self._most_attempts:
                raise fault
            self._transfer.give_back(Range(deque([frame]), avoid=each.senders))


def _put_all(put: PutFrame, arrived: list[Arrived]) -> list[tuple[Arrived, DamagedFrameError]]:
    """Put every frame; return those that are damaged."""
    damaged = []
    for each in arrived:
        try:
            put(each.frame, each.payload)
        except DamagedFrameError as error:
            damaged.append((each, error))
    return damaged
