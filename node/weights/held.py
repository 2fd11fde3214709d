"""A whole version in memory."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from node.policy import PolicyVersion
from node.weights.digests import Words, version_root, words_digest
from node.weights.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class HeldPolicy:
    """The words of one version, and the root computed from them. Nobody writes to them while it is held."""

    version: PolicyVersion
    words: Words
    frame_digests: tuple[int, ...] | None = None
    """``words_digest`` of every frame, if known; whoever needs one need not read the words for it."""

    @classmethod
    def of(cls, number: int, words: Words, *, layout: Layout) -> "HeldPolicy":
        """Name ``words`` version ``number``; what they are is said by the root.

        Raises:
            ValueError: the words are not of this layout.
        """
        check_size(words, layout)
        digests = tuple(words_digest(words[frame.slice]) for frame in layout.frames)
        return cls(PolicyVersion(number, version_root(layout.digest, digests)), words, digests)

    def frame_words(self, layout: Layout) -> Callable[[int], Words]:
        """Give what gives the words of a frame."""
        return lambda number: self.words[layout.frames[number].slice]

    def frames(self, layout: Layout) -> Callable[[int], tuple[Words, int]]:
        """Give what gives the words of a frame and their digest."""
        words_of, known = self.frame_words(layout), self.frame_digests
        if known is None:
            return lambda number: (words_of(number), words_digest(words_of(number)))
        return lambda number: (words_of(number), known[number])


def check_size(words: Words, layout: Layout) -> None:
    """Raise ValueError unless ``words`` is one flat array of the layout's size."""
    if words.dtype != np.uint16 or words.shape != (layout.words,) or not words.flags.c_contiguous:
        raise ValueError(f"words of {words.dtype} {words.shape}; the layout has ({layout.words},) uint16")
