"""Tokens on their way into a cache, a chunk between two decode steps.

A long prompt read at once would hold up every running completion for as long as that takes. Each forward pass
has a bounded number of tokens, which also bounds the memory of its activations.
"""

from collections.abc import Sequence

import torch

from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.kv_cache import KeyValueCache
from sampler.engines.decoding.upload import uploaded


class TokenReading:
    """Reads the tokens of each row into ``cache``."""

    def __init__(
        self, model: CachedModel, rows: Sequence[Sequence[int]], *, after: KeyValueCache | None = None
    ) -> None:
        """Read nothing yet.

        Args:
            rows: At least one. If all are empty, each becomes a column of padding.
            after: Holds what comes before; the rows are then of one length. None: nothing does.
        """
        self._model = model
        width = max(map(len, rows))
        if after is None:
            width = max(1, width)
            first = [width - len(tokens) for tokens in rows]
            after = KeyValueCache(first, columns=width, device=model.device)
        self.cache = after
        ids = [[0] * (width - len(tokens)) + list(tokens) for tokens in rows]
        self._ids = uploaded(ids, dtype=torch.long, device=model.device)
        self._columns_read = 0

    @property
    def is_done(self) -> bool:
        """Whether ``cache`` holds all of it."""
        return self._columns_read == self._ids.shape[1]

    def read_chunk(self, chunk_tokens: int) -> int:
        """Read the next columns; return how many tokens these were.

        Args:
            chunk_tokens: Most tokens of all rows together, padding included; at least a column is read.
        """
        start = self._columns_read
        chunk = self._ids[:, start : start + max(1, chunk_tokens // len(self._ids))]
        self._model.read(chunk, self.cache)
        self._columns_read += chunk.shape[1]
        return chunk.numel()
