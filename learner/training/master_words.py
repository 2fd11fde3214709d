"""A version's words, made of the masters a frame at a time, wherever the model is.

Several threads may make different frames at once. They start no threads of their own and allocate nothing,
except for transfers from a device.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from node import durable
from node.policy import BaseModel
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout

_SERIAL_ELEMENTS: Final = 32_000
"""torch copies fewer than 32 768 elements in the calling thread; for more, each of the publisher's threads
would start threads of its own. Costs a sixth of the copy's speed."""


class MasterWords:
    """Rounds masters to the words of a layout."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        """Read from ``tensors``, contiguous, by the names of the layout.

        Raises:
            ValueError: a tensor is not contiguous.
        """
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(f"tensor {name!r} is not contiguous")
        self._flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
        self._spans = {span.name: span for span in layout.tensors}
        self.layout = layout

    def snapshot(self, words: Words) -> None:
        """Write the whole version into ``words``: [layout.words], floats rounded to nearest even."""
        for number, frame in enumerate(self.layout.frames):
            self.read(number, words[frame.slice])

    def read(self, frame: int, words: Words) -> None:
        """Write the words of one frame, as many as it has; floats rounded to nearest even."""
        for piece in self.layout.overlaps(frame):
            tensor, part = piece.tensor, words[piece.frame_word :][: piece.words]
            width = tensor.dtype.element_bytes
            first = 2 * piece.tensor_word // width
            source = self._flat[tensor.name][first : first + 2 * piece.words // width]
            if source.numel() * width < 2 * piece.words:
                part[-1] = 0  # Its upper half belongs to no element.
            to = torch.from_numpy(part).view(getattr(torch, tensor.dtype.name))
            round_into(to[: source.numel()], source)

    def frame(self, number: int) -> Words:
        """Return the words of one frame."""
        words: Words = np.empty(self.layout.frames[number].words, np.uint16)
        self.read(number, words)
        return words

    def root(self) -> bytes:
        """Return the root of the version that the masters round to."""
        digests = [words_digest(self.frame(number)) for number in range(len(self.layout.frames))]
        return version_root(self.layout.digest, digests)


def keep_public_base(path: Path, masters: MasterWords) -> tuple[Words, BaseModel]:
    """Write the public base model, version 0, where every chain starts, to a file a frame at a time.

    Returns:
        A map of the file, which costs no memory while unread, and its digests.

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


def round_into(to: Tensor, source: Tensor) -> None:
    """Write ``source`` rounded to the dtype of ``to``, which is on the CPU."""
    if source.device.type == "cpu":
        torch._foreach_copy_(torch.split(to, _SERIAL_ELEMENTS), torch.split(source, _SERIAL_ELEMENTS))
    else:
        to.copy_(source)
