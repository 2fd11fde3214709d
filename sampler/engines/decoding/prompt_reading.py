"""Prompts on their way into a cache, a chunk between two decode steps.

A long prompt read at once would hold up every running completion for as long as that takes. Each forward pass
has a bounded number of tokens, which also bounds the memory of its activations.
"""

from collections.abc import Sequence

import torch

from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.kv_cache import KeyValueCache
from sampler.engines.decoding.upload import uploaded


class PromptReading:
    """Reads all but the last token of each row; a row of one token becomes one column of padding."""

    def __init__(self, model: CachedModel, rows: Sequence[Sequence[int]], *, chunk_tokens: int) -> None:
        """Read nothing yet.

        Args:
            rows: at least one; each has a token at least.
            chunk_tokens: of all rows together, padding included, in one forward pass.
        """
        self._model = model
        self._width = max(1, max(map(len, rows)) - 1)
        self._chunk_columns = max(1, chunk_tokens // len(rows))
        ids = [[0] * (self._width - len(tokens) + 1) + list(tokens[:-1]) for tokens in rows]
        self._ids = uploaded(ids, dtype=torch.long, device=model.device)
        first = [self._width - len(tokens) + 1 for tokens in rows]
        self.cache = KeyValueCache(first, columns=self._width, device=model.device)

    @property
    def is_done(self) -> bool:
        """Whether ``cache`` holds all of it."""
        return self.cache.width == self._width

    def read_chunk(self) -> None:
        """Read the next chunk."""
        start = self.cache.width
        self._model.read(self._ids[:, start : start + self._chunk_columns], self.cache)

    def read_all(self) -> KeyValueCache:
        """Read what is left, chunk by chunk."""
        while not self.is_done:
            self.read_chunk()
        return self.cache
