"""A torch model's tensors as views of one flat tensor, in the canonical order of its words.

    flat      a a a a b b b c c c c c c c        one per version in memory
    tensors   |--a--| |-b-| |-----c-----|        parameters and buffers: views, never copies

A version is assembled in a second flat tensor while the model computes, and swapping it in is a change of
pointers; or frames are written into the live one between two steps. Where the model computes in float32,
bfloat16 words become values by a shift. Tensors of other dtypes are kept separately in the dtype they are
published in; a model that computes them in another dtype has copies, rewritten with every version.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from node.errors import StartupError
from node.weights.format.digests import Words
from node.weights.format.dtypes import BFLOAT16, Dtype
from node.weights.format.layout import FrameSpan, Layout, TensorSpan
from sampler.engines.words.model_words import ModelWords

SHIFT: Final = 16
"""bfloat16 is the upper half of float32. Only integers are shifted: float conversions may flush denormals."""


def words_in(values: Tensor) -> Tensor:
    """Return the words of values as int16: float32 that holds bfloat16, or words as they are."""
    if values.dtype is not torch.float32:
        return values.view(torch.int16)
    bits = values.view(torch.int32)
    # The lower half is zero. A bit that flips there changes the word, so the damage is found.
    return (bits >> SHIFT ^ bits).to(torch.int16)


def put_words(values: Tensor, words: Tensor) -> None:
    """Replace values by those of int16 words; see ``words_in``."""
    if values.dtype is torch.float32:
        values.view(torch.int32).copy_(words).bitwise_left_shift_(SHIFT)
    else:
        values.view(torch.int16).copy_(words)


def halves_of(words: Words) -> Tensor:
    """Return words as an int16 tensor; torch refuses views of read-only memory."""
    return torch.from_numpy((words if words.flags.writeable else words.copy()).view(np.int16))


class TorchWords:
    """A version as values on a device; see ``ModelWords``."""

    def __init__(self, layout: Layout, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate room for a version in ``dtype``, bfloat16 or float32; its contents are undefined."""
        narrow = [frame for frame in layout.frames if frame.dtype is BFLOAT16]
        # A layout keeps each dtype together.
        self._start = narrow[0].start_word if narrow else 0
        self._end = self._start + sum(frame.words for frame in narrow)
        self.flat = torch.empty(self._end - self._start, dtype=dtype, device=device)
        # Zeros: half a word after a tensor of single bytes belongs to no element.
        self._others = torch.zeros(layout.words - self.flat.numel(), dtype=torch.int16, device=device)

    def values(self, span: TensorSpan) -> Tensor:
        """Return a view of a tensor, in the computing dtype if published in bfloat16, else as published."""
        part = self._part(span.start_word, span.words, span.dtype)
        if span.dtype is not BFLOAT16:
            part = part.view(getattr(torch, span.dtype.name))[: span.elements]
        return part.view(span.shape)

    def read(self, frame: FrameSpan) -> Words:
        halves = words_in(self._part(frame.start_word, frame.words, frame.dtype))
        words: Words = halves.cpu().numpy().view(np.uint16)
        return words

    def write(self, frame: FrameSpan, words: Words) -> None:
        put_words(self._part(frame.start_word, frame.words, frame.dtype), halves_of(words))

    def memory(self, frame: FrameSpan) -> Words | None:
        part = self._part(frame.start_word, frame.words, frame.dtype)
        if part.device.type != "cpu" or part.dtype is torch.float32:
            return None
        words: Words = part.view(torch.int16).numpy().view(np.uint16)
        return words

    def _part(self, start_word: int, words: int, dtype: Dtype) -> Tensor:
        if dtype is BFLOAT16:
            return self.flat[start_word - self._start :][:words]
        start = start_word if start_word < self._start else start_word - self.flat.numel()
        return self._others[start : start + words]


class LiveTensors:
    """The tensors a model computes with, and the version they are views of; see ``LiveWords``, ``Spares``."""

    def __init__(
        self,
        tensors: Mapping[str, Sequence[Tensor]],
        *,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        exact: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Move ``tensors``, rounded to their words, into a flat tensor of ``dtype``.

        Args:
            tensors: by name in the layout, every parameter and buffer that shares this storage; empty if only
                the words are wanted.
            exact: by name, values that the model's computing dtype cannot hold exactly.
        Raises:
            StartupError: one weight is tied under two shapes.
        """
        self._layout = layout
        self._tensors = tensors
        self._new = partial(TorchWords, layout, dtype=dtype, device=device)
        self._live = self._new()
        for span in layout.tensors:
            for tensor in tensors.get(span.name, ()):
                if tuple(tensor.shape) != span.shape:
                    raise StartupError(
                        f"tensor {span.name!r} of shape {span.shape} is tied to one of {tuple(tensor.shape)}",
                        fix="use a model whose tied weights have one shape",
                    )
            for first in tensors.get(span.name, ())[:1]:
                value = first if exact is None else exact.get(span.name, first)
                # Convert first: copying into a view wider than the published dtype would not round.
                self._live.values(span).copy_(value.to(getattr(torch, span.dtype.name)))
            # At once, so that the memory of one tensor is free before the next is copied.
            self._point(span)

    @property
    def live(self) -> TorchWords:
        """The version the model computes with. Write to it only between two steps, then call ``settle``."""
        return self._live

    @property
    def spares(self) -> "LiveTensors":
        return self

    def new_spare(self) -> TorchWords:
        """Allocate room for another version, to ``swap`` with."""
        return self._new()

    def swap(self, spare: ModelWords) -> TorchWords:
        """Compute with ``spare`` from now on, between two steps; return what was computed with before."""
        if not isinstance(spare, TorchWords):
            raise TypeError(f"a spare is TorchWords, not {type(spare).__name__}")
        before, self._live = self._live, spare
        self.settle()
        return before

    def settle(self) -> None:
        """Point every tensor at the live words."""
        for span in self._layout.tensors:
            self._point(span)

    def _point(self, span: TensorSpan) -> None:
        view = self._live.values(span)
        for tensor in self._tensors.get(span.name, ()):
            if tensor.dtype is view.dtype:
                tensor.data = view
            else:
                # Some models keep a few tensors in float32, whatever dtype the others have.
                tensor.data.copy_(view)


def aliases(model: nn.Module) -> dict[int, list[Tensor]]:
    """Return every parameter and buffer by the address of its storage; tied ones share theirs."""
    found: dict[int, list[Tensor]] = {}
    for _, tensor in itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        known = found.setdefault(tensor.data_ptr(), [])
        if not any(tensor is other for other in known):
            known.append(tensor)
    return found
