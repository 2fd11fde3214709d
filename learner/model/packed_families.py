"""The families whose models read packs, and the trial of a loaded one.

A family is here once a test has shown that logprobs and gradients of packs are those of rows, in float64 to
1e-9. What keeps a family out: a state that goes from token to token (convolutions, recurrences), biases of
scores by distance, or a forward pass that makes its own positions or masks (Nemotron, StableLM).
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from learner.model.pack import Pack
from learner.model.pack_attention import ATTENTION

FAMILIES: Final = frozenset(
    (
        *("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "granite", "seed_oss", "arcee"),
        *("gemma", "gemma2", "gemma3_text", "vaultgemma", "olmo", "olmo2", "olmo3", "cohere", "cohere2"),
        *("glm", "glm4", "exaone4", "phi", "phi3", "starcoder2", "gpt_bigcode", "gpt_neox", "gpt2", "opt"),
        *("ernie4_5", "apertus", "helium", "hunyuan_v1_dense", "nanochat", "persimmon"),
        *("mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "olmoe", "glm4_moe", "gpt_oss"),
        *("granitemoe", "granitemoeshared"),
    )
)
"""By ``model_type``. Experts see tokens one by one, so that mixtures of them are here too."""

_OF_LENGTH: Final = ("dynamic", "longrope")
"""Rotary embeddings that turn every token by the longest row of its micro-batch."""

_ROWS: Final = ((1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 7))
"""Rows of the trial, which begin alike: positions that do not start again in the second one show."""

_APART: Final = 1e-3
"""Largest difference of logits, over the largest logit: far above rounding, far below a token too many."""


def adopt_packs(model: PreTrainedModel, *, tried: PreTrainedModel | None) -> str | None:
    """Make a model read packs, if it computes the same with them; else return why it goes row by row.

    Args:
        tried: of the same family, where ``model`` has no values yet; None: it has.
    """
    tried = model if tried is None else tried
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        return "its family is not among those that were tried"
    if rope := _rope_types(config).intersection(_OF_LENGTH):
        return f"its rotary embedding is {', '.join(rope)}, which turns tokens by the length of what is read"
    before = model.config._attn_implementation
    if before not in ATTENTION:
        return f"its attention is {before}"
    for one in (model, tried):
        one.set_attn_implementation(ATTENTION[before])
    problem = _difference(tried)
    if problem is not None:
        for one in (model, tried):
            one.set_attn_implementation(before)
    return problem


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of rotary embeddings; some families have one for each kind of layer."""
    told: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    each = [told, *(one for one in told.values() if isinstance(one, dict))]
    return {one["rope_type"] for one in each if "rope_type" in one}


@torch.no_grad()
def _difference(model: PreTrainedModel) -> str | None:
    """Return how a model's logits of two rows differ as a pack; None: they do not."""
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
    rows = [np.array(row) % vocabulary for row in _ROWS]
    pack = Pack(rows, device)
    try:
        packed: Tensor = model(input_ids=pack.input_ids, use_cache=False, **pack.keywords(pack.tokens)).logits
        for row, path in zip(rows, pack.paths, strict=True):
            alone: Tensor = model(input_ids=torch.from_numpy(row)[None].to(device), use_cache=False).logits
            if not (packed[0, path] - alone[0]).abs().max() <= _APART * alone.abs().max():
                return "a few tokens that it read as a pack got other logits than row by row"
    except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError) as error:
        return f"a few tokens as a pack: {error}"
    return None
