"""The words an engine computes with, and how they are replaced between two decode steps.

A model computes in the type and on the device that suit it; what is signed, coded and compared are
the words of what it is published in. Whatever holds a version reads and writes it by frames, so that
nobody needs a copy of all of its words only to look at them.
"""

from typing import Protocol

from node.weights.format.digests import Words
from node.weights.format.layout import FrameSpan


class ModelWords(Protocol):
    """A version in memory, on a device or on disk."""

    def read(self, frame: FrameSpan) -> Words:
        """Give the words of a frame, contiguous. Not to be written to: they may be the version itself."""
        ...

    def write(self, frame: FrameSpan, words: Words) -> None:
        """Replace the words of a frame."""
        ...

    def memory(self, frame: FrameSpan) -> Words | None:
        """Give the memory of a frame, to make its words in; None: they are in another form or elsewhere."""
        ...


class LiveWords(Protocol):
    """What the engine computes with; see ``LiveTensors``."""

    @property
    def live(self) -> ModelWords:
        """The version computed with. Read it at any time, write it only between two steps."""
        ...

    def new_spare(self) -> ModelWords:
        """Make room for another version."""
        ...

    def swap(self, spare: ModelWords) -> ModelWords:
        """Compute with ``spare``, between two steps; give what was computed with before."""
        ...

    def settle(self) -> None:
        """Compute with what was written into ``live``, between two steps."""
        ...
