"""Changes of a small model, for tests of their codecs."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from learner.masters.master_words import MasterWords
from learner.merging.changes.coder import difference
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.merge_settings import Compression, MergeSettings
from node.weights.format.layout import Layout, TensorSpec

SHAPES: Final = {
    "bias": torch.Size([7]),
    "embedding": torch.Size([96, 40]),
    "gain": torch.Size([]),
    "heads": torch.Size([4, 3, 5]),
}
"""One is factored by ``low_rank`` of rank 4, the others are not."""

LAYOUT: Final = Layout.of(
    [
        TensorSpec(name, tuple(shape), "float16" if name == "bias" else "bfloat16")
        for name, shape in SHAPES.items()
    ],
    frame_words=1000,
)
"""Tensors lie across frames, frames across tensors."""

COMPRESSIONS: Final[tuple[Compression, ...]] = ("full", "four_bit", "low_rank", "largest", "word_changes")


def merge_settings(compression: Compression) -> MergeSettings:
    """Return settings for small tensors."""
    return MergeSettings(compression=compression, rank=4, share=0.05)


def drawn(seed: int, *, scale: float = 1.0) -> dict[str, Tensor]:
    """Return normal float32 of the shapes."""
    source = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def changed(masters: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return masters minus anchor, by the names of the anchor."""
    return {name: difference(masters[name].detach(), anchor[name]) for name in anchor}


def words_of(masters: Mapping[str, Tensor], layout: Layout = LAYOUT) -> WordsBefore:
    """Return the words that masters round to now, read-only."""
    words = MasterWords({name: tensor.float() for name, tensor in masters.items()}, layout)
    frames = [words.frame(number) for number in range(len(layout.frames))]
    for frame in frames:
        frame.setflags(write=False)
    return WordsBefore(layout, frames.__getitem__)


def float32_kinds(count: int, source: np.random.Generator) -> Tensor:
    """Return floats of all exponents, signs and zeros, subnormals with them."""
    bits = source.integers(0, 1 << 32, count, dtype=np.uint32)
    bits[(bits >> 23 & 0xFF) == 0xFF] ^= np.uint32(1 << 30)
    bits[source.random(count) < 0.1] &= np.uint32(1 << 31)
    bits[source.random(count) < 0.1] &= np.uint32((1 << 31) | (1 << 12) - 1)
    return torch.from_numpy(bits.view(np.float32))
