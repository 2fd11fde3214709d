"""Live words without a model around them, and how to look at them."""

import numpy as np
import torch

from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from sampler.engines.words.model_words import ArrayWords, ModelWords, copy_words
from sampler.engines.words.torch_words import LiveTensors
from support.weights import LAYOUT


def live_words(words: Words, *, layout: Layout = LAYOUT, dtype: torch.dtype = torch.bfloat16) -> LiveTensors:
    """Return live words that are ``words``, of a model that computes in ``dtype``."""
    live = LiveTensors({}, layout=layout, dtype=dtype, device=torch.device("cpu"))
    copy_words(ArrayWords(words), live.live, layout=layout)
    return live


def words_of(words: ModelWords, *, layout: Layout = LAYOUT) -> Words:
    """Return a copy of all words."""
    return np.concatenate([words.read(frame) for frame in layout.frames])
