"""Attention within a pack, by the name that transformers' models ask for it.

    CUDA, half precision   one kernel for tails of all lengths
    elsewhere              tails in buckets, padded: one call of scaled_dot_product_attention for each

Keys and values of a row are gathered from the pack: a token that rows share gets the gradient of each.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from learner.model.pack import Pack, TailBucket

logger = logging.getLogger(__name__)

Attention = Callable[..., tuple[Tensor, Tensor | None]]

ATTENTION: Final = {"sdpa": "packed_prefixes", "eager": "packed_prefixes_or_eager"}
"""A model's attention -> name of ``attend`` in transformers that gives rows what they got, bit for bit."""

_HALF: Final = (torch.bfloat16, torch.float16)
"""Dtypes of the kernel for tails of all lengths."""

_HARMLESS: Final = frozenset({"position_ids", "cache_position", "output_router_logits"})
"""Other keywords that models hand on, besides those that are off, which say nothing about attention."""


@dataclass(frozen=True, slots=True, eq=False)
class Bend:
    """Changes to scores before and in the softmax, which no kernel here knows."""

    cap: float | None = None
    """Bound of the absolute value of scores, which tanh keeps; None: there is none."""
    sinks: Tensor | None = None
    """[heads], scores of a token more, which nothing is taken from; None: there is none."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    of_rows: Attention = sdpa_attention_forward,
    pack: Pack | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as ``of_rows`` does; in a pack, to the tokens of each row up to itself.

    Args:
        query: [rows, heads, tokens, width]; a pack is one row. Keys and values may have fewer heads.
        named: as transformers' models give them: ``softcap`` and ``s_aux`` are cap and sinks of a ``Bend``.

    Returns:
        [rows, tokens, heads, width], and of a pack no weights.

    Raises:
        ValueError: the model adds to a pack's attention what is not known here.
    """
    if pack is None:
        return of_rows(module, query, key, value, attention_mask, **named)
    if attention_mask is None or attention_mask.numel():
        raise ValueError("the model makes a mask of its own, which would let a pack's rows see each other")
    scale, cap, sinks = (named.pop(name, None) for name in ("scaling", "softcap", "s_aux"))
    # Qwen2-MoE leaves its window to the mask.
    window = named.pop("sliding_window", getattr(module, "sliding_window", None))
    unknown = {name for name, given in named.items() if isinstance(given, Tensor) or given} - _HARMLESS
    if unknown:
        raise ValueError(f"its attention takes {', '.join(sorted(unknown))}")
    if torch.is_autocast_enabled(query.device.type):
        narrow = torch.get_autocast_dtype(query.device.type)
        query, key, value = (one.to(narrow) for one in (query, key, value))
    bend = None if cap is None and sinks is None else Bend(cap, sinks)
    length = query.shape[2]
    query, key, value = (one[0, :, : pack.tokens].transpose(0, 1) for one in (query, key, value))
    found = attention_in_pack(pack, query, key, value, scale=scale, window=window, bend=bend)
    padding = length - pack.tokens
    return (pad(found, (0, 0, 0, 0, 0, padding)) if padding else found)[None], None


def _eager(module: torch.nn.Module, *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
    """Attend as the family's own module does."""
    made: tuple[Tensor, Tensor | None] = sys.modules[type(module).__module__].eager_attention_forward(
        module, *args, **named
    )
    return made


def attention_in_pack(
    pack: Pack,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    bend: Bend | None = None,
) -> Tensor:
    """Return what each token of a pack makes of its row, [tokens, heads, width].

    Args:
        query: [tokens, heads, width]; ``key``, ``value``: [tokens, heads or fewer, width].
        scale: of scores; None: one over the root of the width.
        window: see ``TailBucket.mask``.
        bend: of scores; None: they stay as they are.
    """
    if bend is None and query.dtype in _HALF and kernel_works(query.device):
        return _by_extents(pack, query, key, value, scale=scale, window=window)
    return _in_buckets(pack, query, key, value, scale=scale, window=window, bend=bend)


@cache
def kernel_works(device: torch.device) -> bool:
    """Return whether a device has the kernel for tails of all lengths, and it does what is expected.

    Tried once, outside of a model: a layer that is computed again would find another number of products.
    """
    if device.type != "cuda":
        return False
    works = bool(_kernel_parameters()) and is_attention(_by_extents, device)
    if not works:
        logger.warning("packs are slower here: torch has no kernel for rows of many lengths that works")
    return works


@torch.no_grad()
def is_attention(kernel: Callable[..., Tensor], device: torch.device) -> bool:
    """Return whether a kernel's attention is that of buckets, but for rounding, on a few made-up tokens."""
    pack = Pack([np.array(row) for row in ((1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 7), (8, 9))], device)
    random = torch.Generator(device).manual_seed(0)
    states = [
        torch.randn(pack.tokens, heads, 64, dtype=torch.bfloat16, device=device, generator=random)
        for heads in (4, 2, 2)
    ]
    for window in (None, 3):
        right = _in_buckets(pack, *(one.float() for one in states), scale=None, window=window)
        try:
            found = kernel(pack, *states, scale=None, window=window)
        except RuntimeError:  # not compiled for this device
            return False
        if not (found - right).abs().max() < 0.1:
            return False
    return True


@cache
def _kernel_parameters() -> frozenset[str]:
    """Return what torch's kernel takes; before 2.11 it knows no windows, and is left alone."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    taken = frozenset(inspect.signature(varlen_attn).parameters)
    return taken if "window_size" in taken else frozenset()


def kernel_operations() -> list[torch._ops.OpOverload]:
    """Return the kernel's operations, whose results are kept where a layer is computed again in part."""
    return [torch.ops.torch_attn._varlen_attn.default] if _kernel_parameters() else []


def _in_buckets(pack: Pack, *states: Tensor, **how: Any) -> Tensor:
    """Return what ``attention_in_pack`` does, tails of about one size at a time."""
    buckets, places = pack.buckets
    made = [_in_bucket(bucket, *states, **how) for bucket in buckets]
    return torch.cat(made).index_select(0, places)


def _by_extents(
    pack: Pack, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # not in every torch

    extents = pack.extents
    told: dict[str, Any] = {}
    if "enable_gqa" in _kernel_parameters():  # older ones take fewer heads of keys without being told
        told["enable_gqa"] = query.shape[1] != key.shape[1]
    made: Tensor = varlen_attn(  # type: ignore[assignment]
        query,
        key.index_select(0, extents.keys),
        value.index_select(0, extents.keys),
        extents.query_ends,
        extents.key_ends,
        extents.most_queries,
        extents.most_keys,
        scale=scale,
        # Of fewer queries than keys the last one is beside the last key: see torch.nn.attention.bias.
        window_size=(-1 if window is None else window - 1, 0),
        **told,
    )
    return made


def _in_bucket(
    bucket: TailBucket,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    bend: Bend | None = None,
) -> Tensor:
    """Return the attention of a bucket's queries, padding included: [tails * queries, heads, width]."""
    heads_a_key = query.shape[1] // key.shape[1]
    asked, keys, values = (
        _gathered(one, places)
        for one, places in ((query, bucket.queries), (key, bucket.keys), (value, bucket.keys))
    )
    if bend is None and bucket.is_causal(window):
        keys, values = (
            one.unsqueeze(2).expand(-1, -1, heads_a_key, -1, -1).flatten(1, 2) for one in (keys, values)
        )
        found = scaled_dot_product_attention(asked, keys, values, is_causal=True, scale=scale)
    else:  # heads that share keys ask as one, so that the keys, which may be many, are not copied for each
        tails, heads, length, width = asked.shape
        mask = bucket.mask(window, query.dtype, heads_a_key)
        asked = asked.reshape(tails, heads // heads_a_key, heads_a_key * length, width)
        if bend is None:
            found = scaled_dot_product_attention(asked, keys, values, mask, scale=scale)
        else:
            found = _bent(asked, keys, values, mask, scale=scale or width**-0.5, bend=bend)
        found = found.reshape(tails, heads, length, -1)
    return found.transpose(1, 2).flatten(0, 1)


def _bent(asked: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float, bend: Bend) -> Tensor:
    """Do what scaled_dot_product_attention does, with bent scores, all in memory at once."""
    scores = asked @ keys.mT * scale
    if bend.cap is not None:
        scores = bend.cap * torch.tanh(scores / bend.cap)
    scores = scores + mask
    if bend.sinks is not None:
        heads, length = scores.shape[1:3]
        sinks = bend.sinks.view(heads, -1, 1).expand(-1, -1, length * heads // len(bend.sinks))
        scores = torch.cat([scores, sinks.reshape(1, heads, length, 1).expand(len(scores), -1, -1, -1)], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide)[..., : keys.shape[2]].to(values.dtype) @ values


def _gathered(tokens: Tensor, places: Tensor) -> Tensor:
    """Return tokens, [tokens, heads, width], at places, [rows, length]: [rows, heads, length, width]."""
    found = tokens.index_select(0, places.flatten())
    return found.view(*places.shape, *tokens.shape[1:]).transpose(1, 2)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION["sdpa"], attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION["sdpa"], sdpa_mask)
ALL_ATTENTION_FUNCTIONS.register(ATTENTION["eager"], partial(attend, of_rows=_eager))
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION["eager"], eager_mask)
