"""The words of a version, made of the masters a frame at a time, wherever the model is.

Several threads may make different frames at once; none of them makes more threads, and memory is
taken by nobody but for transfers from a device.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from node.weights.digests import Words
from node.weights.layout import Layout

_SERIAL_ELEMENTS: Final = 32_000
"""torch copies fewer than 32 768 elements in the calling thread; for more, each of the publisher's
threads would start threads of its own. Costs a sixth of the copy's speed."""


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
        self._layout = layout

    def read(self, frame: int, words: Words) -> None:
        """Write the words of one frame, as many as it has, rounded to nearest even."""
        flat = torch.from_numpy(words).view(torch.bfloat16)
        for piece in self._layout.pieces(frame):
            source = self._flat[piece.tensor.name][piece.tensor_word : piece.tensor_word + piece.words]
            _copy(flat[piece.frame_word : piece.frame_word + piece.words], source)


def _copy(to: Tensor, source: Tensor) -> None:
    if source.device.type == "cpu":
        torch._foreach_copy_(torch.split(to, _SERIAL_ELEMENTS), torch.split(source, _SERIAL_ELEMENTS))
    else:
        to.copy_(source)
