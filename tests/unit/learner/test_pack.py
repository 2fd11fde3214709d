"""Attention in a pack against attention in each of its rows, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.model.pack import Pack
from learner.model.pack_attention import attend, attention_in_pack, is_attention, kernel_works
from learner.model.prefix_tree import Tokens

CPU = torch.device("cpu")
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)
WINDOWS = st.sampled_from([None, 1, 3, 50])


def arrays(rows: list[list[int]]) -> list[Tokens]:
    return [np.array(row, np.int32) for row in rows]


def made_up(tokens: int, *, heads: int = 4, key_heads: int = 2) -> list[Tensor]:
    """Return queries, keys and values."""
    random = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, count, 8) for count in (heads, key_heads, key_heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_() for shape in shapes]


def attention_of_row(query: Tensor, key: Tensor, value: Tensor, *, window: int | None) -> Tensor:
    """Return the attention of a row's tokens, [tokens, heads, width], from the formula."""
    back = torch.arange(len(query))[:, None] - torch.arange(len(key))
    is_seen = (back >= 0) & (back < (window or len(key)))
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    scores = torch.einsum("qhw,khw->hqk", query, key) / 3.0
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khw->qhw", weights, value)


@given(ROWS)
def test_rows_are_read_off_their_paths_at_their_positions(rows: list[list[int]]) -> None:
    pack = Pack(arrays(rows), CPU)
    positions = pack.keywords(pack.tokens)["position_ids"][0].numpy()
    for row, path in zip(rows, pack.paths, strict=True):
        assert pack.input_ids[0, path].tolist() == row
        assert positions[path].tolist() == list(range(len(row)))
    assert sorted(place for tail in pack.tails for place in tail.path[-tail.own :]) == list(
        range(pack.tokens)
    )


@given(ROWS, WINDOWS)
def test_attention_in_a_pack_is_that_in_each_row_and_so_is_its_gradient(
    rows: list[list[int]], window: int | None
) -> None:
    pack = Pack(arrays(rows), CPU)
    states = made_up(pack.tokens)
    found = attention_in_pack(pack, *states, scale=1 / 3, window=window)
    expected = torch.zeros_like(found)
    for path in map(torch.from_numpy, pack.paths):
        expected = expected.index_put([path], attention_of_row(*(one[path] for one in states), window=window))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((one * weight).sum(), states) for one in (found, expected)]
    for actual, right in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-9, atol=1e-11)


@given(ROWS, WINDOWS)
def test_extents_with_the_last_query_beside_the_last_key_are_the_same_attention(
    rows: list[list[int]], window: int | None
) -> None:
    pack = Pack(arrays(rows), CPU)
    states = made_up(pack.tokens)
    expected = attention_in_pack(pack, *states, scale=1 / 3, window=window)
    found = by_extents(pack, *states, scale=1 / 3, window=window)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def by_extents(
    pack: Pack,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    aligns_ends: bool = True,
) -> Tensor:
    """Return what the kernel for extents, which has no CPU, makes of a pack by flash attention's manual."""
    extents, left = pack.extents, -1 if window is None else window - 1
    scale = scale or query.shape[2] ** -0.5
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    found = []
    for tail in range(len(pack.tails)):
        asked = query[extents.query_ends[tail] : extents.query_ends[tail + 1]]
        places = extents.keys[extents.key_ends[tail] : extents.key_ends[tail + 1]]
        assert len(asked) <= extents.most_queries
        assert len(places) <= extents.most_keys
        beside = torch.arange(len(asked))[:, None] + aligns_ends * (len(places) - len(asked))
        number = torch.arange(len(places))
        is_seen = (number <= beside) & ((left < 0) | (number >= beside - left))
        scores = torch.einsum("qhw,khw->hqk", asked, key[places]) * scale
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        found.append(torch.einsum("hqk,khw->qhw", weights, value[places]))
    return torch.cat(found)


def without_windows(pack: Pack, *states: Tensor, scale: float | None, window: int | None) -> Tensor:
    return by_extents(pack, *states, scale=scale, window=None)


def failing(pack: Pack, *states: Tensor, scale: float | None, window: int | None) -> Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("kernel", "is_right"),
    [
        (by_extents, True),
        (without_windows, False),
        (partial(by_extents, aligns_ends=False), False),
        (failing, False),
    ],
)
def test_a_kernel_that_is_off_is_not_used(kernel: Callable[..., Tensor], is_right: bool) -> None:
    assert is_attention(kernel, CPU) == is_right
    assert not kernel_works(CPU)


@given(st.integers(0, 100), st.integers(1, 400))
def test_buckets_pad_a_quarter_at_most_or_less_than_a_call_costs(seed: int, longest: int) -> None:
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 9, random.integers(1, longest + 1))
    rows = [
        np.concatenate([prompt, random.integers(0, 9, random.integers(1, longest + 1))]) for _ in range(24)
    ]
    pack = Pack(rows, CPU)
    buckets, places = pack.buckets
    assert sorted(places.tolist()) == places.sort().values.tolist()
    assert len(set(places.tolist())) == pack.tokens
    padded = sum(bucket.queries.numel() * bucket.keys.shape[1] for bucket in buckets)
    alone = sum(tail.queries * len(tail.path) for tail in pack.tails)
    assert padded <= 1.25 * alone + len(buckets) * (1 << 14)


@pytest.mark.parametrize(
    ("mask", "keywords"),
    [
        (torch.ones(1, 1, 3, 3, dtype=torch.bool), {}),
        (None, {}),
        (torch.empty(1, 1, 0, 0), {"position_bias": torch.zeros(1, 4, 3, 3)}),
        (torch.empty(1, 1, 0, 0), {"output_attentions": True}),
        (torch.empty(1, 1, 0, 0), {"dropout": 0.1}),
    ],
)
def test_what_a_model_adds_to_attention_is_refused(mask: Tensor | None, keywords: dict[str, object]) -> None:
    pack = Pack(arrays([[1, 2], [1, 3]]), CPU)
    query, key, value = (one.transpose(0, 1)[None] for one in made_up(3))
    given: dict[str, Any] = {"pack": pack, **keywords}
    with pytest.raises(ValueError, match=next(iter(keywords), "mask")):
        attend(torch.nn.Module(), query, key, value, mask, **given)
