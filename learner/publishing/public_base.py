"""The public base model's words on disk: version 0, where every chain starts, read a frame at a time."""

from pathlib import Path

import numpy as np

from learner.training.master_words import MasterWords
from node import durable
from node.policy import BaseModel
from node.weights.format.digests import Words, words_digest


def keep_public_base(path: Path, masters: MasterWords) -> tuple[Words, BaseModel]:
    """Write version 0; return a map of the file, which costs no memory while unread, and its digests.

    Raises:
        OSError: it cannot be written.
    """
    layout, digests = masters.layout, []
    room = np.empty(max(frame.words for frame in layout.frames), "<u2")
    with durable.replacing(path) as file:
        for number, frame in enumerate(layout.frames):
            words = room[: frame.words]
            masters.read(number, words)
            file.write(words.data)
            digests.append(words_digest(words))
    mapped: Words = np.memmap(path, dtype=np.uint16, mode="r")
    return mapped, layout.base_model(digests)
