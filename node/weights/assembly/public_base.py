"""The public base model, version 0, on disk: where every chain of deltas may start.

    <file>    words u16..., little-endian, in the order of the layout

Written a frame at a time, and read through a memory map, so that it costs no memory while it is unread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from node.errors import StartupError
from node.system import durable
from node.values.policy import BaseModel, PolicyVersion
from node.weights.format.digests import Words, words_digest
from node.weights.format.layout import Layout
from node.weights.planning.cheapest_chain import PUBLIC_VERSION

TakeWords = Callable[[int, Words], object]
"""Takes the words of one frame, which may be overwritten afterwards."""

CopyFrames = Callable[[TakeWords], object]
"""Hands over the words of every frame of a version, in any order."""

_THREADS: Final = 4
"""Threads that verify the file; each hashes as fast as memory is read."""


@dataclass(frozen=True, slots=True, eq=False)
class PublicBase:
    """Version 0 on disk."""

    words: Words
    """A map of the file."""
    version: PolicyVersion
    model: BaseModel
    """As it is told to the coordinator."""

    @classmethod
    def keep(
        cls, path: Path, digests: Sequence[int], copy_frames: CopyFrames, *, layout: Layout
    ) -> "PublicBase":
        """Write the base model, unless the file holds it already.

        Args:
            digests: ``words_digest`` of every frame.
        Raises StartupError: the file cannot be written.
        """
        try:
            words = _mapped(path, layout)
            if words is None or _digests(words, layout) != list(digests):
                with durable.replacing(path) as file:

                    def take(frame: int, words: Words) -> None:
                        file.seek(2 * layout.frames[frame].start_word)
                        file.write(words.data)

                    copy_frames(take)
                words = _mapped(path, layout)
        except OSError as error:
            raise StartupError(
                f"{path} cannot be written: {error}", fix="Make room on the disk of the state directory."
            ) from error
        if words is None:
            raise StartupError(f"{path} does not have the size that was written", fix="Check the disk.")
        model = layout.base_model(digests)
        return cls(words, PolicyVersion(PUBLIC_VERSION, model.root), model)


def _mapped(path: Path, layout: Layout) -> Words | None:
    if not path.exists() or path.stat().st_size != 2 * layout.words:
        return None
    words: Words = np.memmap(path, dtype=np.uint16, mode="r")
    return words


def _digests(words: Words, layout: Layout) -> list[int]:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:
        return list(threads.map(lambda frame: words_digest(words[frame.slice]), layout.frames))
