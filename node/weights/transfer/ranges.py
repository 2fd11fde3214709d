"""The ranges of one fetch: those waiting for a lane, those being read, and the payloads they have brought.

unasked --cut--> waiting --take--> read by one lane --all of it arrived--> gone
                    ^                 |
                    `-- give_back ----'

A range is several frames, or a part of one: a large frame travels over several connections at once,
so that a relay can verify and forward it after a fraction of a second on any link.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import grpc.aio

from node.rpc.call_ends import ConnectionLost
from node.values import limits
from node.values.policy import ArtifactKey
from node.weights.format.manifest import Manifest

_SMALL_BYTES: Final = 4096

ChunkStream: TypeAlias = grpc.aio.UnaryStreamCall[Any, Any]
"""Messages with ``frame``, ``offset_bytes`` and ``data``: of FetchFrames or, unasked, of AwaitArtifact."""

PutFrame = Callable[[int, bytes], None]
"""Takes a frame's payload, in a thread; raises DamagedFrameError to have it fetched again."""


class LyingSourceError(ConnectionLost):
    """A source sent what it was not asked for."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A payload, whole; not verified yet."""

    frame: int
    payload: bytes
    senders: frozenset[str]
    """The sources of these bytes. If there is only one, it is to blame for damage."""


@dataclass(slots=True, eq=False)
class Range:
    """Frames to be read in order, or a part of one frame."""

    frames: deque[int]
    next_bytes: int = 0
    """Where in the payload of the first frame the next byte belongs."""
    end_bytes: int = 0
    """Where the range ends in the payload of its only frame; 0: the range is whole frames."""
    avoid: frozenset[str] = frozenset()
    came_damaged: bool = False
    """Whether it is a frame that arrived damaged: who sends it again looks at its own copy first."""
    source: str = ""
    stream: ChunkStream | None = None
    """Already open: ``source`` sends these frames without being asked."""

    def left_bytes(self, manifest: Manifest) -> int:
        sizes = (manifest.frames[frame].payload_bytes for frame in self.frames)
        return (self.end_bytes if self.frames and self.end_bytes else sum(sizes)) - self.next_bytes

    def cancel_stream(self) -> None:
        if self.stream is not None:
            self.stream.cancel()
            self.stream = None


class Unasked:
    """Frames that no lane reads yet, in order, to be cut into ranges."""

    def __init__(self, manifest: Manifest, frames: Iterable[int], *, part_bytes: int | None) -> None:
        """Begin with ``frames``. Parts of one are about ``part_bytes`` or more; None: frames are not cut."""
        self._manifest = manifest
        self._frames = deque(frames)
        self._part_bytes = part_bytes
        self._at_bytes = 0
        self.left_bytes = sum(manifest.frames[frame].payload_bytes for frame in self._frames)

    def forget(self) -> None:
        """Leave the frames out that no part was cut from."""
        kept = 1 if self._at_bytes else 0
        while len(self._frames) > kept:
            self.left_bytes -= self._manifest.frames[self._frames.pop()].payload_bytes

    def cut(self, enough_bytes: int) -> Range | None:
        """Return the next range, of about ``enough_bytes``; None: nothing is left."""
        if not self._frames:
            return None
        span = self._part(enough_bytes) or Range(deque(self._whole(enough_bytes)))
        self.left_bytes -= span.left_bytes(self._manifest)
        return span

    def _part(self, enough_bytes: int) -> Range | None:
        frame, start_bytes = self._frames[0], self._at_bytes
        end_bytes = size_bytes = self._manifest.frames[frame].payload_bytes
        if self._part_bytes is not None:
            enough_bytes = max(enough_bytes, self._part_bytes)
            # The last part is up to half as long again, rather than very short.
            if 2 * (size_bytes - start_bytes) > 3 * enough_bytes:
                end_bytes = start_bytes + enough_bytes
        if (start_bytes, end_bytes) == (0, size_bytes):
            return None
        self._at_bytes = end_bytes
        if end_bytes == size_bytes:
            self._frames.popleft()
            self._at_bytes = 0
        return Range(deque([frame]), start_bytes, end_bytes)

    def _whole(self, enough_bytes: int) -> Iterator[int]:
        taken_bytes = count = 0
        while self._frames and count < limits.FRAMES_PER_FETCH:
            taken_bytes += self._manifest.frames[self._frames[0]].payload_bytes
            if count and 2 * taken_bytes > 3 * enough_bytes:
                return
            yield self._frames.popleft()
            count += 1


@dataclass(slots=True)
class _Partial:
    """A payload of which some pieces have arrived."""

    left_bytes: int
    pieces: dict[int, bytes | bytearray] = field(default_factory=dict)
    """By where they begin. Small ones join the one before: a source may send a byte at a time."""
    _ends: dict[int, int] = field(default_factory=dict)
    """Where a piece ends -> where it begins."""
    senders: set[str] = field(default_factory=set)

    def add(self, start: int, piece: bytes, sender: str) -> None:
        begin = self._ends.pop(start, start) if len(piece) < _SMALL_BYTES else start
        if begin == start:
            self.pieces[start] = piece
        else:
            held = self.pieces[begin]
            if isinstance(held, bytes):
                held = self.pieces[begin] = bytearray(held)
            held += piece
        self._ends[start + len(piece)] = begin
        self.left_bytes -= len(piece)
        self.senders.add(sender)

    def joined(self) -> bytes:
        return b"".join(self.pieces[begin] for begin in sorted(self.pieces))


@dataclass(eq=False)
class Transfer:
    """The ranges of one fetch: waiting for a lane, or being read."""

    manifest: Manifest
    put: PutFrame
    waiting: deque[Range]
    unasked: Unasked
    reading: set[Range] = field(default_factory=set, init=False)
    decoding: int = field(default=0, init=False)
    """Messages being decoded: each may give a damaged frame back."""
    damaged: Counter[int] = field(default_factory=Counter, init=False)
    is_wound_up: bool = field(default=False, init=False)
    """Whether frames that were not begun were left out."""
    arrived_bytes: int = field(default=0, init=False)
    first_at_s: float = field(default=0.0, init=False)
    last_at_s: float = field(default=0.0, init=False)
    """When the first and the last bytes arrived, by ``time.monotonic``."""
    changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _partial: dict[int, _Partial] = field(default_factory=dict, init=False)

    @property
    def key(self) -> ArtifactKey:
        return self.manifest.key

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to read, or can still be given back."""
        return not (self.waiting or self.reading or self.decoding or self.unasked.left_bytes)

    def wind_up(self) -> None:
        """Leave the frames out that were not begun."""
        self.unasked.forget()
        self.is_wound_up = True
        self.changed.set()

    def close(self) -> None:
        """End the streams that no lane reads."""
        for span in self.waiting:
            span.cancel_stream()

    def take(self, enough_bytes: int) -> Range | None:
        """Return a range to read, a new one of about ``enough_bytes``; None: none is left.

        What is on its way comes first. What was given back comes last, so that it delays nothing else.
        """
        is_on_its_way = self.waiting and self.waiting[0].stream is not None
        span = None if is_on_its_way else self.unasked.cut(enough_bytes)
        if span is None and self.waiting:
            span = self.waiting.popleft()
        if span is not None:
            self.reading.add(span)
        return span

    def arrive(self, span: Range, frame: int, offset_bytes: int, data: bytes) -> list[Arrived]:
        """Add a chunk that the source of ``span`` sent; return the payloads that are whole now.

        Raises LyingSourceError: the chunk is not what comes next, or is more than was asked for.
        """
        due = span.frames[0], span.next_bytes
        if (frame, offset_bytes) != due or not 1 <= len(data) <= limits.CHUNK_BYTES:
            raise LyingSourceError(
                f"{span.source} sent {len(data)} bytes of frame {frame} at {offset_bytes}, "
                f"where frame {due[0]} at {due[1]} was due"
            )
        room_bytes = span.left_bytes(self.manifest)
        if len(data) > room_bytes:
            raise LyingSourceError(f"{span.source} sent {len(data)} bytes where {room_bytes} were due")
        self.last_at_s = time.monotonic()
        self.first_at_s = self.last_at_s if not self.arrived_bytes else self.first_at_s
        self.arrived_bytes += len(data)
        arrived, at = [], 0
        while at < len(data):
            frame, start = span.frames[0], span.next_bytes
            end = span.end_bytes or self.manifest.frames[frame].payload_bytes
            piece = data[at : at + end - start]
            at += len(piece)
            span.next_bytes += len(piece)
            if span.next_bytes == end:
                span.frames.popleft()
                span.next_bytes = 0
            if (whole := self._add(frame, start, piece, span.source)) is not None:
                arrived.append(whole)
        return arrived

    def _add(self, frame: int, start: int, piece: bytes, sender: str) -> Arrived | None:
        size_bytes = self.manifest.frames[frame].payload_bytes
        if len(piece) == size_bytes:
            return Arrived(frame, piece, frozenset({sender}))
        partial = self._partial.setdefault(frame, _Partial(size_bytes))
        partial.add(start, piece, sender)
        if partial.left_bytes:
            return None
        del self._partial[frame]
        return Arrived(frame, partial.joined(), frozenset(partial.senders))

    def give_back(self, span: Range) -> None:
        self.waiting.append(span)
        self.changed.set()

    def decoded(self) -> None:
        self.decoding -= 1
        self.changed.set()

    def leave(self, span: Range) -> None:
        self.reading.discard(span)
        self.changed.set()
