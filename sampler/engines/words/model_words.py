"""A version's words in memory, in a file or on a device, read and written frame by frame.

A model computes in the type and on the device that suit it. What is signed, coded and compared are the words
it is published in. Frames let a version be hashed, copied and replaced without a second copy of its words.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

from node.values.policy import PolicyVersion
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import FrameSpan, Layout

THREADS: Final = min(8, os.cpu_count() or 1)
"""Threads that go through a version in parallel; each needs the memory of three frames at most."""


class ModelWords(Protocol):
    """The words of one version."""

    def read(self, frame: FrameSpan) -> Words:
        """Return the words of a frame, contiguous. Do not write to them: they may be the version itself."""

    def write(self, frame: FrameSpan, words: Words) -> None:
        """Replace the words of a frame."""

    def memory(self, frame: FrameSpan) -> Words | None:
        """Return a frame's memory, to decode into; None if it holds another form or is elsewhere."""


class Spares(Protocol):
    """Copies of the weights beside the live one, to assemble a version in."""

    def new_spare(self) -> ModelWords:
        """Allocate room for another version."""

    def swap(self, spare: ModelWords) -> ModelWords:
        """Compute with ``spare`` from now on, between two steps; return what was computed with before."""


class LiveWords(Protocol):
    """The words an engine computes with, and how they are replaced between two decode steps."""

    @property
    def live(self) -> ModelWords:
        """The version computed with. Read it at any time; write to it only between two steps."""

    @property
    def spares(self) -> Spares | None:
        """Where a version can be assembled beside the live one; None: it is written over it."""

    def settle(self) -> None:
        """Compute with what was written into ``live``, between two steps."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayWords:
    """A version in one array, which may be a memory-mapped file."""

    words: Words

    def read(self, frame: FrameSpan) -> Words:
        return self.words[frame.slice]

    def write(self, frame: FrameSpan, words: Words) -> None:
        self.words[frame.slice] = words

    def memory(self, frame: FrameSpan) -> Words | None:
        return self.words[frame.slice]


def frame_digests(words: ModelWords, frames: Sequence[FrameSpan]) -> list[int]:
    """Return ``words_digest`` of each frame, computed in ``THREADS`` threads."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as threads:
        return list(threads.map(lambda frame: words_digest(words.read(frame)), frames))


def version_of(number: int, words: ModelWords, *, layout: Layout) -> PolicyVersion:
    """Return version ``number`` with the root of ``words``. Reads all of them."""
    return PolicyVersion(number, version_root(layout.digest, frame_digests(words, layout.frames)))


def copy_words(source: ModelWords, target: ModelWords, *, layout: Layout) -> None:
    """Copy every frame of ``source`` into ``target``."""
    for frame in layout.frames:
        target.write(frame, source.read(frame))
