"""A pack: one row of the distinct tokens of many rows, and which of them each token attends to.

    rows     the cat sat | the dog        tokens      the cat sat dog
                                          positions   0   1   2   1       of each in its rows
                                          tails       the cat sat | dog, after 1 token of another

A tail is what a row has of its own. Its tokens attend to the row's tokens up to themselves, and to nothing
else; all other work of a model is done token by token. ``pack_attention`` does the attention.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from learner.model.prefix_tree import PrefixTree, Tokens

_PADDED: Final = 1.25
"""Scores of a bucket, over those of its tails alone, at most."""

_FREE_SCORES: Final = 1 << 14
"""Scores of padding that may come on top: a bucket more costs more than they do."""

_MOST_SCORES: Final = 1 << 24
"""Scores of a bucket of several tails, at most: a mask of 64 MiB in float32."""

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """The tokens that a pack has of one row alone."""

    path: Places
    """Places of the row's tokens in the pack, those of the tail last."""
    own: int
    """Tokens of the tail."""

    @property
    def is_whole(self) -> bool:
        """Whether to ask all of the row: where the tail is most of it, that is less work than a mask."""
        return 2 * self.own >= len(self.path)

    @property
    def queries(self) -> int:
        """Number of tokens whose attention is computed, the row's last ones."""
        return len(self.path) if self.is_whole else self.own


class Extents(NamedTuple):
    """Tails after one another, for a kernel that takes where each one begins and ends."""

    keys: Tensor
    """[sum of paths], int64: where in the pack the tokens are that tails attend to."""
    query_ends: Tensor
    """[tails + 1], int32; queries are the pack's tokens in order."""
    key_ends: Tensor
    """[tails + 1], int32"""
    most_queries: int
    most_keys: int


@dataclass(frozen=True, slots=True, eq=False)
class TailBucket:
    """Tails of about one size, padded on the right, where no token looks."""

    queries: Tensor
    """[tails, queries], int64, places in the pack."""
    keys: Tensor
    """[tails, keys], int64, places in the pack, from each row's first token on."""
    first: Tensor
    """[tails, 1], int64: position of the first query."""
    is_whole: bool
    """Whether queries and keys are the same."""
    _masks: dict[tuple[int | None, torch.dtype, int], Tensor] = field(default_factory=dict)

    def is_causal(self, window: int | None) -> bool:
        """Return whether nothing but what comes later is masked, of whole rows."""
        return self.is_whole and (window is None or window >= self.keys.shape[1])

    def mask(self, window: int | None, dtype: torch.dtype, copies: int = 1) -> Tensor:
        """Return what is added to scores, one tensor for all layers.

        Args:
            window: how many tokens a token looks back on, itself included; None: on all.
            copies: of the queries, one after the other.

        Returns:
            [tails, 1, copies * queries, keys], 0 or minus infinity.
        """
        key = window, dtype, copies
        if key not in self._masks:
            length, device = self.keys.shape[1], self.first.device
            position = self.first + torch.arange(self.queries.shape[1], device=device)
            back = position[..., None] - torch.arange(length, device=device)
            mask = torch.zeros(back.shape, dtype=dtype, device=device)
            mask.masked_fill_((back < 0) | (back >= (length if window is None else window)), -torch.inf)
            self._masks[key] = mask[:, None].repeat(1, 1, copies, 1)
        return self._masks[key]


class Pack:
    """The distinct tokens of rows, each of which has at least one."""

    def __init__(self, rows: Sequence[Tokens], device: torch.device) -> None:
        """Lay out the rows; tensors are on ``device``."""
        tree = PrefixTree.of(rows)
        self._device = device
        self.paths: list[Places] = [np.zeros(0, np.int64)] * len(rows)
        """Places of each row's tokens in the pack."""
        self.tails: list[Tail] = []
        """In order, they have every token of the pack once."""
        tokens: list[Tokens] = []
        positions: list[Places] = []
        path, size = np.zeros(0, np.int64), 0
        for row, length, shared in zip(tree.order, tree.lengths, tree.shared, strict=True):
            own = length - shared
            path = self.paths[row] = np.concatenate([path[:shared], np.arange(size, size + own)])
            if own:
                self.tails.append(Tail(path, own))
                tokens.append(rows[row][shared:])
                positions.append(np.arange(shared, length))
                size += own
        self.tokens = size
        self.input_ids = self._on_device(np.concatenate(tokens)[None].astype(np.int64))
        """[1, tokens]"""
        self._positions = self._on_device(np.concatenate(positions)[None])

    def keywords(self, length: int) -> dict[str, Any]:
        """Return what a model's forward pass takes besides the tokens, which may be padded to ``length``.

        An empty mask has transformers make none. What it does not know it hands on to the attention function.
        """
        return {
            "position_ids": pad(self._positions, (0, length - self.tokens)),
            "attention_mask": torch.empty(1, 1, 0, 0, device=self._device),
            "pack": self,
        }

    @cached_property
    def extents(self) -> Extents:
        """The tails after one another."""
        own, lengths = [tail.own for tail in self.tails], [len(tail.path) for tail in self.tails]
        query_ends, key_ends = (np.cumsum([0, *sizes]).astype(np.int32) for sizes in (own, lengths))
        return Extents(
            keys=self._on_device(np.concatenate([tail.path for tail in self.tails])),
            query_ends=self._on_device(query_ends),
            key_ends=self._on_device(key_ends),
            most_queries=max(own),
            most_keys=max(lengths),
        )

    @cached_property
    def buckets(self) -> tuple[list[TailBucket], Tensor]:
        """The tails in buckets; and where each token is among all their queries, flattened: [tokens]."""
        places, begun = np.zeros(self.tokens, np.int64), 0
        buckets: list[TailBucket] = []
        for tails in _similar(self.tails):
            queries = np.zeros((len(tails), max(tail.queries for tail in tails)), np.int64)
            keys = np.zeros((len(tails), max(len(tail.path) for tail in tails)), np.int64)
            is_own = np.zeros(queries.shape, np.bool_)
            for row, tail in enumerate(tails):
                keys[row, : len(tail.path)] = tail.path
                queries[row, : tail.queries] = tail.path[-tail.queries :]
                is_own[row, tail.queries - tail.own : tail.queries] = True
            places[queries[is_own]] = begun + np.flatnonzero(is_own)
            begun += queries.size
            first = np.array([[len(tail.path) - tail.queries] for tail in tails])
            bucket = TailBucket(
                queries=self._on_device(queries),
                keys=self._on_device(keys),
                first=self._on_device(first),
                is_whole=tails[0].is_whole,
            )
            buckets.append(bucket)
        return buckets, self._on_device(places)

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _similar(tails: Iterable[Tail]) -> Iterator[list[Tail]]:
    """Yield tails in lists of about one size: the work of each, padded, is little more than of its tails."""
    alike: list[Tail] = []
    queries, scores = 0, 0
    in_order = sorted(tails, key=lambda tail: (tail.is_whole, len(tail.path), tail.queries), reverse=True)
    for tail in in_order:
        alone = tail.queries * len(tail.path)
        if alike:
            padded = (len(alike) + 1) * max(queries, tail.queries) * len(alike[0].path)
            least = scores + alone
            bound = min(_MOST_SCORES, max(_PADDED * least, least + _FREE_SCORES))
            if alike[0].is_whole != tail.is_whole or padded > bound:
                yield alike
                alike, queries, scores = [], 0, 0
        alike.append(tail)
        queries, scores = max(queries, tail.queries), scores + alone
    yield alike
