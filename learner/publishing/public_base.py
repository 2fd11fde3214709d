"""The public base model's words on disk: version 0, where every chain starts, read a frame at a time."""

from pathlib import Path

import numpy as np

from learner.training.master_words import MasterWords
from node import durable
from node.weights.format.digests import Words
from node.weights.format.layout import Layout


def keep_public_base(path: Path, masters: MasterWords, *, layout: Layout) -> Words:
    """Write version 0 and return it as a map of the file, which costs no memory while nobody reads it.

    Raises:
        OSError: it cannot be written.
    """
    room = np.empty(max(frame.words for frame in layout.frames), "<u2")
    with durable.replacing(path) as file:
        for number, frame in enumerate(layout.frames):
            words = room[: frame.words]
            masters.read(number, words)
            file.write(words.data)
    mapped: Words = np.memmap(path, dtype=np.uint16, mode="r")
    return mapped
