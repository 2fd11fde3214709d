"""The public base model's words on disk, to be read a frame at a time: every chain starts at version 0."""

from pathlib import Path

import numpy as np

from learner.training.master_words import MasterWords
from node import durable
from node.errors import StartupError
from node.weights.format.digests import Words
from node.weights.format.layout import Layout


def keep_public_base(path: Path, masters: MasterWords, *, layout: Layout) -> Words:
    """Write version 0 and give it as a map of the file: it costs no memory while nobody reads it.

    Raises:
        StartupError: it cannot be written.
    """
    room = np.empty(max(frame.words for frame in layout.frames), "<u2")
    try:
        with durable.replacing(path) as file:
            for number, frame in enumerate(layout.frames):
                words = room[: frame.words]
                masters.read(number, words)
                file.write(words.data)
        mapped: Words = np.memmap(path, dtype=np.uint16, mode="r")
    except OSError as error:
        raise StartupError(
            f"{path} cannot be written: {error}", fix="Make room on the disk of the state directory."
        ) from error
    return mapped
