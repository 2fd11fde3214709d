"""Whether the live words are still those that were verified: hashed again, a few frames at a time.

    verified --turn, turn, turn ...--> every frame was looked at; and again from the first
                  |
                  '-- a frame has another digest: the words are no version any more

Memory of gaming cards and home machines flips bits, and nothing else would notice: a version is
verified when it is put together, and the next delta reads only the frames that it changes.
"""

from collections.abc import Sequence
from typing import Final

from node.weights.format.digests import words_digest
from node.weights.format.layout import Layout
from sampler.engines.model_words import ModelWords, frame_digests

TURN_WORDS: Final = 32 << 20
"""Words looked at in one turn, or one frame. With a turn at every heartbeat, 2 s apart, a model of 0.5 B
parameters is looked through in half a minute, one of 8 B in nine; a turn costs about 20 ms of a core."""


class MemoryScrub:
    """Remembers the digests of the live words, and where it has got to."""

    def __init__(self, layout: Layout, *, turn_words: int = TURN_WORDS) -> None:
        self._layout = layout
        self._turn_words = turn_words
        self._digests: tuple[int, ...] = ()
        self._next = 0

    def verified(self, digests: Sequence[int]) -> None:
        """Expect these digests, one for each frame, from now on. The order of turns stays as it was."""
        self._digests = tuple(digests)

    def take_stock(self, live: ModelWords) -> None:
        """Expect the words as they are: they were verified just now."""
        self.verified(frame_digests(live, self._layout.frames))

    def turn(self, live: ModelWords) -> int | None:
        """Look at the next frames, which nobody writes to meanwhile; give the first that is not as it was.

        Blocking.
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
