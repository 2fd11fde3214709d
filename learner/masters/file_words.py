"""The words that safetensors files round to, read a few tensors at a time.

    a model directory, a checkpoint's masters of all ranks --tensor after tensor--> frames

Each tensor is read once, if frames come in order. Those of a frame are in memory, and some after them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from learner.masters.master_words import MasterWords
from learner.masters.tensor_files import load_tensors
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpan

BATCH_BYTES: Final = 1 << 28
"""Size from which tensors are read later: the headers of all files are read for each batch."""


class FileWords:
    """Words of a layout, of tensors in a directory."""

    def __init__(self, directory: Path, layout: Layout, *, names: Mapping[str, str] | None = None) -> None:
        """Read nothing yet.

        Args:
            names: of the layout's tensors in the files; None: they have the same.
        """
        self._directory = directory
        self._layout = layout
        self._names = names or {span.name: span.name for span in layout.tensors}
        self._numbers = {span.name: number for number, span in enumerate(layout.tensors)}
        self._tensors: dict[str, torch.Tensor] = {}
        self._words = MasterWords({}, layout)

    def frame(self, number: int) -> Words:
        """Return the words of a frame, floats rounded to nearest even.

        Raises:
            OSError: a file cannot be read.
            ValueError: the files are not of these tensors.
        """
        needed = [piece.tensor for piece in self._layout.overlaps(number)]
        if any(span.name not in self._tensors for span in needed):
            self._read(needed)
        return self._words.frame(number)

    def _read(self, needed: list[TensorSpan]) -> None:
        """Read what is needed and not here, and what comes after; forget the rest."""
        names = {span.name for span in needed}
        self._words = MasterWords({}, self._layout)
        self._tensors = {name: one for name, one in self._tensors.items() if name in names}
        size_bytes, read = 0, dict[str, torch.Tensor]()
        for span in self._layout.tensors[self._numbers[needed[0].name] :]:
            tensor_bytes = span.elements * max(4, span.dtype.element_bytes)
            if span.name not in names and size_bytes + tensor_bytes > BATCH_BYTES:
                break
            size_bytes += tensor_bytes
            if span.name not in self._tensors:
                dtype = torch.float32 if span.dtype.is_floating else getattr(torch, span.dtype.name)
                read[span.name] = torch.empty(span.shape, dtype=dtype)
        load_tensors(self._directory, {self._names[name]: tensor for name, tensor in read.items()})
        self._tensors |= read
        self._words = MasterWords(self._tensors, self._layout)
