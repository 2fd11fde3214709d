"""Rows on their way into the batch: they are read into a cache, a chunk between two decode steps.

    queued -> being read: the prompts once each, then the completions so far -> rows of the batch

The engine has two readers: one for the prompts of new requests, one for running rows whose keys and values
older weights computed. Such a row draws nothing until it has been read again. Rows with the fewest tokens are
read first, which keeps the fewest waiting. Rows that are not read yet when the next version comes are read
before all others, so that none waits for ever where versions come faster than rows can be read.

A long prompt read at once would hold up every running completion for as long as that takes. Each forward pass
has a bounded number of tokens, which also bounds the memory of its activations.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.decode_batch import DecodeBatch
from sampler.engines.decoding.kv_cache import KeyValueCache, uploaded
from sampler.engines.decoding.rows import Row, requests_of


class RowReader:
    """Reads rows into caches of their own and joins them to the batch."""

    def __init__(self, model: CachedModel, batch: DecodeBatch, *, chunk_tokens: int) -> None:
        """Start without rows."""
        self._model = model
        self._batch = batch
        self._chunk_tokens = chunk_tokens
        self._queued: list[Row] = []
        self._being_read: list[Row] = []
        """Rows of one length, so that a prompt is read once for all of its rows."""
        self._reading: _Reading | None = None
        self._at: Sequence[int] = ()
        """For each row being read, its row in the cache that is read into."""
        self._completions_follow = False

    @property
    def rows(self) -> list[Row]:
        """All of them, those read first in front."""
        return [*self._being_read, *self._queued]

    @property
    def held_bytes(self) -> int:
        """Memory of the cache that is being read into."""
        return 0 if self._reading is None else self._reading.cache.held_bytes

    def queue(self, rows: Iterable[Row]) -> None:
        """Read ``rows`` after those there are. Every token drawn for them must be known to them."""
        self._queued += rows

    def begin_again(self) -> None:
        """Read all rows by new weights."""
        self._queued = self.rows
        self._stop_reading()

    def drop_ended(self) -> None:
        """Drop the rows that draw no more."""
        self._queued = [row for row in self._queued if row.draws_more]
        if not any(row.draws_more for row in self._being_read):
            self._stop_reading()

    def read(self, tokens: int, *, most_rows: int) -> int:
        """Read up to ``tokens`` tokens, unless that is less than half a chunk; return how many these were.

        Args:
            most_rows: Rows that fit beside the batch.
        """
        left = tokens
        while left > self._chunk_tokens // 2 and (self._reading is not None or self._queued):
            if self._reading is None:
                self._reading = self._begun(most_rows)
            left -= self._reading.read_chunk(left)
            if self._reading.is_done and self._completions_follow:
                self._reading = self._completions_after(self._reading.cache)
            if self._reading.is_done:
                self._join(self._reading.cache)
        return tokens - left

    def _begun(self, most_rows: int) -> "_Reading":
        """Return what reads the prompts of the next rows."""
        drawn = len(self._queued[0].token_ids)
        if drawn:
            most_rows = min(most_rows, max(1, self._chunk_tokens // drawn))
        candidates = self._queued[:most_rows]
        self._being_read = list(takewhile(lambda row: len(row.token_ids) == drawn, candidates))
        del self._queued[: len(self._being_read)]
        requests = requests_of(self._being_read)
        numbers = {id(running): number for number, running in enumerate(requests)}
        self._at = [numbers[id(row.running)] for row in self._being_read]
        self._completions_follow = drawn > 0
        # The last token of a row is the input of its next step.
        prompts = [running.prompt if drawn else running.prompt[:-1] for running in requests]
        width = max(1, *map(len, prompts))
        first = [width - len(prompt) for prompt in prompts]
        cache = KeyValueCache(first, columns=width, device=self._model.device)
        return _Reading(self._model, [[0] * (width - len(p)) + p for p in prompts], cache)

    def _completions_after(self, prompts: KeyValueCache) -> "_Reading":
        """Return what reads all but the last token of each completion."""
        cache = KeyValueCache([], columns=0, device=self._model.device)
        cache.join(prompts, self._at)
        self._at = range(len(self._being_read))
        self._completions_follow = False
        return _Reading(self._model, [row.token_ids[:-1] for row in self._being_read], cache)

    def _join(self, cache: KeyValueCache) -> None:
        kept = [(at, row) for at, row in zip(self._at, self._being_read, strict=True) if row.draws_more]
        self._batch.join([row for _, row in kept], cache=cache, at=[at for at, _ in kept])
        self._stop_reading()

    def _stop_reading(self) -> None:
        self._being_read, self._reading = [], None


class _Reading:
    """Reads the tokens of each row, all of them equally many, into ``cache``."""

    def __init__(self, model: CachedModel, rows: Sequence[Sequence[int]], cache: KeyValueCache) -> None:
        """Read nothing yet."""
        self._model = model
        self.cache = cache
        self._ids = uploaded(rows, device=model.device)
        self._columns_read = 0

    @property
    def is_done(self) -> bool:
        """Whether ``cache`` holds all of it."""
        return self._columns_read == self._ids.shape[1]

    def read_chunk(self, chunk_tokens: int) -> int:
        """Read the next columns, at least one; return how many tokens these were, padding included."""
        start = self._columns_read
        chunk = self._ids[:, start : start + max(1, chunk_tokens // len(self._ids))]
        self._model.read(chunk, self.cache)
        self._columns_read += chunk.shape[1]
        return chunk.numel()
