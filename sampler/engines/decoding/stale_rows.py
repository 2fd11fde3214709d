"""Running rows whose keys and values older weights computed, on their way back into the batch.

    serve -> stale -> being read: the prompts once each, then the completions -> rows of the batch
             shortest first                                                      draw again

A row draws nothing until it has been read again. Those with the fewest tokens are read first, which keeps the
fewest rows waiting. Rows that are still stale when the next version comes are read before all others, so that
none waits for ever where versions come faster than rows can be read.
"""

from itertools import takewhile

from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.decode_batch import DecodeBatch
from sampler.engines.decoding.kv_cache import KeyValueCache
from sampler.engines.decoding.rows import Row, requests_of
from sampler.engines.decoding.token_reading import TokenReading


class StaleRows:
    """Reads rows again and puts them back into ``batch``."""

    def __init__(self, model: CachedModel, batch: DecodeBatch, *, chunk_tokens: int) -> None:
        """Start without rows.

        Args:
            chunk_tokens: Read in one forward pass, padding included.
        """
        self._model = model
        self._batch = batch
        self._chunk_tokens = chunk_tokens
        self._waiting: list[Row] = []
        self._being_read: list[Row] = []
        """Of one length each, so that a prompt is read once for all of its rows."""
        self._reading: TokenReading | None = None
        self._reads_prompts = False

    @property
    def rows(self) -> list[Row]:
        """All of them, those read first in front."""
        return [*self._being_read, *self._waiting]

    @property
    def held_bytes(self) -> int:
        """Memory of the cache that is being read into."""
        return 0 if self._reading is None else self._reading.cache.held_bytes

    def take_batch(self) -> None:
        """Begin again with new weights. Every token drawn for a row must be known to it."""
        self._waiting = self.rows + sorted(self._batch.take_all(), key=lambda row: len(row.token_ids))
        self._being_read, self._reading = [], None

    def drop_ended(self) -> None:
        """Drop the rows that draw no more."""
        self._waiting = [row for row in self._waiting if row.draws_more]
        if not any(row.draws_more for row in self._being_read):
            self._being_read, self._reading = [], None

    def read(self, tokens: int, *, most_rows: int) -> None:
        """Read up to ``tokens`` tokens, unless a smaller part than half a chunk is left.

        Args:
            most_rows: For which there is memory beside the batch; at least 1 if there are rows.
        """
        while tokens > self._chunk_tokens // 2 and (self._reading is not None or self._waiting):
            if self._reading is None:
                self._reading = self._begun(most_rows)
            tokens -= self._reading.read_chunk(tokens)
            if self._reading.is_done and self._reads_prompts:
                self._reading = self._completions_after(self._reading.cache)
            if self._reading.is_done:
                self._join(self._reading.cache)

    def _begun(self, most_rows: int) -> TokenReading:
        tokens = len(self._waiting[0].token_ids)
        candidates = self._waiting[: min(most_rows, max(1, self._chunk_tokens // tokens))]
        self._being_read = list(takewhile(lambda row: len(row.token_ids) == tokens, candidates))
        self._waiting = self._waiting[len(self._being_read) :]
        self._reads_prompts = True
        return TokenReading(self._model, [running.prompt for running in requests_of(self._being_read)])

    def _completions_after(self, prompts: KeyValueCache) -> TokenReading:
        """Return what reads all but the last token of each completion."""
        self._reads_prompts = False
        at = {id(running): number for number, running in enumerate(requests_of(self._being_read))}
        cache = KeyValueCache([], columns=0, device=self._model.device)
        cache.join(prompts, [at[id(row.running)] for row in self._being_read])
        return TokenReading(self._model, [row.token_ids[:-1] for row in self._being_read], after=cache)

    def _join(self, cache: KeyValueCache) -> None:
        kept = [(number, row) for number, row in enumerate(self._being_read) if row.draws_more]
        self._batch.join([row for _, row in kept], cache=cache, at=[number for number, _ in kept])
        self._being_read, self._reading = [], None
