"""A version's words, made of the masters a frame at a time, wherever the model is.

Several threads may make different frames at once. They start no threads of their own and allocate nothing,
except for transfers from a device.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from learner.masters.version_coder import LocalCoder, VersionCoder
from node.weights.assembly.public_base import PublicBase, TakeWords
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout
from node.weights.store.artifact_files import Draft

_SERIAL_ELEMENTS: Final = 32_000
"""torch copies fewer than 32 768 elements in the calling thread; for more, each of the publisher's threads
would start threads of its own. Costs a sixth of the copy's speed."""


Spool = Callable[[], AbstractContextManager[Draft]]
"""Makes a file for payloads that do not come in order."""


class PolicyWords(Protocol):
    """The words that a model's masters round to, wherever they are."""

    @property
    def layout(self) -> Layout:
        """Layout of the model."""
        ...

    def digests(self) -> list[int]:
        """Return ``words_digest`` of every frame."""
        ...

    def copy_frames(self, take: TakeWords) -> None:
        """Hand over the words of every frame, one at a time, in order."""
        ...

    def coder(self, *, threads: int, spool: Spool) -> VersionCoder:
        """Return what codes versions of them.

        Args:
            threads: of this process.
        """
        ...


def root_of(words: PolicyWords) -> bytes:
    """Return the root of the version that the masters round to."""
    return version_root(words.layout.digest, words.digests())


def keep_base(path: Path, words: PolicyWords) -> PublicBase:
    """Keep the words of the base model in a file. Raises StartupError: it cannot be written."""
    return PublicBase.keep(path, words.digests(), words.copy_frames, layout=words.layout)


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
        self.layout = layout

    def read(self, frame: int, words: Words) -> None:
        """Write the words of one frame, as many as it has; floats rounded to nearest even."""
        for name, entries, to in typed_parts(self.layout, frame, words):
            source = self._flat[name][entries]
            if source.numel() < to.numel():
                to[-1] = 0  # the upper half of the last word belongs to no element
            round_into(to[: source.numel()], source)

    def frame(self, number: int) -> Words:
        """Return the words of one frame."""
        words: Words = np.empty(self.layout.frames[number].words, np.uint16)
        self.read(number, words)
        return words

    def digests(self) -> list[int]:
        """Return ``words_digest`` of every frame."""
        digests: list[int] = []
        self.copy_frames(lambda _, words: digests.append(words_digest(words)))
        return digests

    def copy_frames(self, take: TakeWords) -> None:
        """Hand over the words of every frame, one at a time, in order."""
        room: Words = np.empty(max(frame.words for frame in self.layout.frames), np.uint16)
        for number, frame in enumerate(self.layout.frames):
            self.read(number, room[: frame.words])
            take(number, room[: frame.words])

    def coder(self, *, threads: int, spool: Spool) -> VersionCoder:
        """Return what codes versions of them; their payloads come in order."""
        return LocalCoder(self, threads=threads)


def typed_parts(layout: Layout, frame: int, words: Words) -> Iterator[tuple[str, slice, Tensor]]:
    """Yield the parts of tensors in a frame: the name, which entries, and their words in the tensor's dtype.

    The words share memory with ``words``, and have an entry too many where half of the last one is empty.
    """
    for piece in layout.overlaps(frame):
        tensor, part = piece.tensor, words[piece.frame_word :][: piece.words]
        typed = torch.from_numpy(part).view(getattr(torch, tensor.dtype.name))
        first = 2 * piece.tensor_word // tensor.dtype.element_bytes
        yield tensor.name, slice(first, min(first + typed.numel(), tensor.elements)), typed


def round_into(to: Tensor, source: Tensor) -> None:
    """Write ``source`` rounded to the dtype of ``to``, which is on the CPU."""
    if source.device.type == "cpu":
        torch._foreach_copy_(torch.split(to, _SERIAL_ELEMENTS), torch.split(source, _SERIAL_ELEMENTS))
    else:
        to.copy_(source)
