"""The ranges of one fetch: which wait for a lane, which are read, and what has arrived of them.

waiting --take--> read by one lane --every frame arrived--> gone
   ^                 |        |
   `-- give_back ----'        `-- take_over: another lane goes on where it is
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from node import limits
from node.policy import ArtifactKey
from node.rpc.channel import ConnectionLost
from node.weights.expected import PieceStream
from node.weights.manifest import Manifest

PutFrame = Callable[[int, bytes], None]
"""Takes a frame's payload, in a thread; raises DamagedFrameError to have it fetched again."""


class LyingSourceError(ConnectionLost):
    """A source sent what it was not asked for."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole payload, not verified yet."""

    frame: int
    payload: bytes
    senders: frozenset[str]
    """Whose bytes these are; of one alone it is known whom to blame."""


@dataclass(slots=True, eq=False)
class Range:
    """Frames to be read one after the other, and what has arrived of the first."""

    frames: deque[int]
    avoid: frozenset[str] = frozenset()
    partial: bytearray = field(default_factory=bytearray)
    senders: set[str] = field(default_factory=set)
    source: str = ""
    deadline: asyncio.Timeout | None = None
    """Of the read under way."""
    started_s: float = 0.0
    read_bytes: int = 0
    """Since then, from the source it is read from now."""
    times_taken: int = 0
    stream: PieceStream | None = None
    """Open already: ``source`` sends these frames unasked."""

    def take(self, frame: int, offset_bytes: int, data: bytes, manifest: Manifest) -> list[Arrived]:
        """Add a piece of some payloads, and give the frames that it completes.

        Raises:
            LyingSourceError: it is not what comes next.
        """
        due, at = (self.frames[0], len(self.partial)), 0
        if (frame, offset_bytes) != due or not 1 <= len(data) <= limits.CHUNK_BYTES:
            raise LyingSourceError(
                f"{self.source} sent {len(data)} bytes of frame {frame} at {offset_bytes}, "
                f"where frame {due[0]} at {due[1]} was due"
            )
        room_bytes = -len(self.partial)
        for wanted in self.frames:
            room_bytes += manifest.frames[wanted].payload_bytes
            if room_bytes >= len(data):
                break
        else:
            raise LyingSourceError(f"{self.source} sent {len(data)} bytes where {room_bytes} were due")
        arrived: list[Arrived] = []
        while at < len(data):
            frame, held = self.frames[0], len(self.partial)
            end = at + manifest.frames[frame].payload_bytes - held
            taken = data if (at, end) == (0, len(data)) else data[at:end]
            at += len(taken)
            self.senders.add(self.source)
            if at < end:
                self.partial += taken
                break
            payload = b"".join((self.partial, taken)) if held else taken
            arrived.append(Arrived(frame, payload, frozenset(self.senders)))
            self.frames.popleft()
            self.partial.clear()
            self.senders.clear()
        return arrived


class Transfer:
    """The ranges of one fetch: waiting for a lane, or being read."""

    def __init__(self, manifest: Manifest, put: PutFrame, waiting: deque[Range]) -> None:
        self.manifest = manifest
        self.put = put
        self.waiting = waiting
        self.reading: set[Range] = set()
        self.damaged: Counter[int] = Counter()
        self.changed = asyncio.Event()

    @property
    def key(self) -> ArtifactKey:
        """Give the artifact fetched."""
        return self.manifest.key

    @property
    def is_over(self) -> bool:
        """Say whether nothing is left to read."""
        return not self.waiting and not self.reading

    def take(self) -> Range | None:
        """Give a range to read; None: none waits."""
        if not self.waiting:
            return None
        span = self.waiting.popleft()
        self.reading.add(span)
        return span

    def take_over(self, slow: Range) -> Range:
        """Take what is left of a range, its partial frame included; whoever reads it finds it empty."""
        span = Range(slow.frames, frozenset({slow.source}), slow.partial, slow.senders)
        span.times_taken = slow.times_taken + 1
        slow.frames, slow.partial, slow.senders = deque(), bytearray(), set()
        if slow.deadline is not None:
            slow.deadline.reschedule(0.0)
        self.reading.add(span)
        return span

    def give_back(self, span: Range) -> None:
        """Let any lane read a range."""
        self.waiting.append(span)
        self.changed.set()

    def leave(self, span: Range) -> None:
        """Say that a range is not read any more."""
        self.reading.discard(span)
        self.changed.set()
