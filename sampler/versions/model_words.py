"""The words of one whole version, wherever they are kept, a frame at a time.

A model computes in the type and on the device that suit it; what is signed, coded and compared are
the words of what it is published in. Whatever holds a version reads and writes it by frames, so that
nobody needs a copy of all of its words only to look at them.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from node import durable
from node.errors import StartupError
from node.policy import PolicyVersion
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import FrameSpan, Layout
from node.weights.planning.chain import PUBLIC_VERSION
from sampler.engines.live_words import ModelWords

THREADS: Final = min(8, os.cpu_count() or 1)
"""That go through a version together; each takes the memory of three frames at most."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayWords:
    """A version in one array, which may be a map of a file."""

    words: Words

    def read(self, frame: FrameSpan) -> Words:
        return self.words[frame.slice]

    def write(self, frame: FrameSpan, words: Words) -> None:
        self.words[frame.slice] = words

    def memory(self, frame: FrameSpan) -> Words | None:
        return self.words[frame.slice]


def frame_digests(words: ModelWords, frames: Sequence[FrameSpan]) -> list[int]:
    """Give ``words_digest`` of each frame; on all cores, as long as it takes to read them."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as threads:
        return list(threads.map(lambda frame: words_digest(words.read(frame)), frames))


def version_of(number: int, words: ModelWords, *, layout: Layout) -> PolicyVersion:
    """Name ``words`` version ``number``; what they are is said by the root. Reads them all."""
    return PolicyVersion(number, version_root(layout.digest, frame_digests(words, layout.frames)))


def copy_words(source: ModelWords, target: ModelWords, *, layout: Layout) -> None:
    """Make ``target`` the version that ``source`` is."""
    for frame in layout.frames:
        target.write(frame, source.read(frame))


@dataclass(frozen=True, slots=True, eq=False)
class PublicBase:
    """Version 0 on disk, where every chain starts: mapped, it costs no memory while nobody reads it."""

    words: ArrayWords
    version: PolicyVersion

    @classmethod
    def keep(cls, path: Path, live: ModelWords, *, layout: Layout) -> "PublicBase":
        """Write the base model, which is in ``live``, unless it is there already.

        Raises:
            StartupError: it cannot be written.
        """
        version = version_of(PUBLIC_VERSION, live, layout=layout)
        try:
            kept = _mapped(path, layout)
            if kept is None or version_of(PUBLIC_VERSION, kept, layout=layout) != version:
                _write(path, live, layout=layout)
                kept = _mapped(path, layout)
        except OSError as error:
            raise StartupError(
                f"{path} cannot be written: {error}", fix="Make room on the disk of the state directory."
            ) from error
        if kept is None:
            raise StartupError(f"{path} has not the size that was written", fix="Check the disk.")
        return cls(kept, version)


def _mapped(path: Path, layout: Layout) -> ArrayWords | None:
    if not path.exists() or path.stat().st_size != 2 * layout.words:
        return None
    return ArrayWords(np.memmap(path, dtype=np.uint16, mode="r"))


def _write(path: Path, words: ModelWords, *, layout: Layout) -> None:
    with durable.replacing(path) as file:
        write_frames(file.fileno(), words, layout=layout)


def write_frames(descriptor: int, words: ModelWords, *, layout: Layout) -> None:
    """Append a version to an open file, little-endian as in memory.

    Raises:
        OSError: it cannot be written.
    """
    for frame in layout.frames:
        rest = words.read(frame).data.cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]
