"""Finds damage in memory: hashes the live words again, a few frames at a time, round and round.

    expected digests --check, check, check ...--> every frame was hashed; again from the first
                          |
                          '-- a frame has another digest: the words are no version any more

Memory without ECC flips bits, and nothing else would notice: a version is verified when it is assembled, and
the next delta reads only the frames that it changes.
"""

from collections.abc import Sequence
from typing import Final

from node.weights.format.digests import words_digest
from node.weights.format.layout import Layout
from sampler.engines.model_words import ModelWords, frame_digests

TURN_WORDS: Final = 32 << 20
"""Words hashed in one turn, and at least one frame. With a turn at every heartbeat, 2 s apart, a pass over
0.5 B parameters takes half a minute, one over 8 B nine; a turn costs about 20 ms of a core."""


class MemoryScrub:
    """The expected digests of the live words, and which frame is next."""

    def __init__(self, layout: Layout, *, turn_words: int = TURN_WORDS) -> None:
        self._layout = layout
        self._turn_words = turn_words
        self._digests: tuple[int, ...] = ()
        self._next = 0

    def expect(self, digests: Sequence[int]) -> None:
        """Expect these digests from now on, one for each frame. The next frame stays the same."""
        self._digests = tuple(digests)

    def expect_current(self, live: ModelWords) -> None:
        """Expect the words as they are, just verified."""
        self.expect(frame_digests(live, self._layout.frames))

    def check_next(self, live: ModelWords) -> int | None:
        """Hash the next frames and return the first that has changed, else None.

        Blocking. Nobody may write to the words meanwhile.
        """
        left = self._turn_words
        for _ in self._layout.frames:
            frame, span = self._next, self._layout.frames[self._next]
            self._next = (self._next + 1) % len(self._layout.frames)
            if words_digest(live.read(span)) != self._digests[frame]:
                return frame
            left -= span.words
            if left <= 0:
                break
        return None
