"""A whole version in memory."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from node.values.policy import PolicyVersion
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class HeldPolicy:
    """The words of one version, and the root computed from them. The words are not written while held."""

    version: PolicyVersion
    words: Words

    @classmethod
    def of(cls, number: int, words: Words, *, layout: Layout) -> "HeldPolicy":
        """Return ``words`` as version ``number``, with the root computed from them.

        Raises ValueError: the words are not of this layout.
        """
        check_size(words, layout)
        digests = (words_digest(words[frame.slice]) for frame in layout.frames)
        return cls(PolicyVersion(number, version_root(layout.digest, digests)), words)

    def frame_words(self, layout: Layout) -> Callable[[int], Words]:
        """Return a function that returns a frame's words."""
        return lambda number: self.words[layout.frames[number].slice]


def check_size(words: Words, layout: Layout) -> None:
    """Raise ValueError unless ``words`` is one flat array of the layout's size."""
    if words.dtype != np.uint16 or words.shape != (layout.words,) or not words.flags.c_contiguous:
        raise ValueError(f"words of {words.dtype} {words.shape}; the layout has ({layout.words},) uint16")
