"""Requests from the queue to their last token.

    add -> waiting -> being read, a chunk per step -> rows of the batch -> finished
           for memory                                 drawn, read back
                         being read again <-- at a new version

The queue has no bound of its own: the sampler has no more requests than ``sampler.concurrency_groups``.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import takewhile

import torch

from sampler.engines.decoding.cached_model import CachedModel, TokenReading
from sampler.engines.decoding.decode_batch import DecodeBatch
from sampler.engines.decoding.kv_cache import GROWTH_COLUMNS, KeyValueCache
from sampler.engines.decoding.rows import MemoryBudget, Row, RunningRequest, requests_of
from sampler.engines.decoding.sampling import by_inverse, by_noise
from sampler.engines.engine import FinishedRequest, GenerationRequest
from sampler.engines.engine_options import TorchOptions
from sampler.engines.model_tokenizer import ModelTokenizer


class Decoder:
    """Completes requests step by step; see ``sampler.engines.engine.Engine``."""

    def __init__(
        self,
        model: CachedModel,
        tokenizer: ModelTokenizer,
        generator: torch.Generator,
        options: TorchOptions,
        *,
        memory_bytes: int | None,
    ) -> None:
        """Start without requests; ``memory_bytes`` bounds all caches, None: no bound."""
        self._model = model
        self._tokenizer = tokenizer
        self._chunk_tokens = options.prefill_chunk_tokens
        self._budget = MemoryBudget(memory_bytes, model.cache_bytes(), spare_columns=GROWTH_COLUMNS)
        self._version = 0
        self._running: dict[str, RunningRequest] = {}
        self._waiting: deque[RunningRequest] = deque()
        self._being_read: list[RunningRequest] = []
        self._reading: TokenReading | None = None
        draw = partial(by_inverse if options.draw == "inverse" else by_noise, generator=generator)
        self._batch = DecodeBatch(model, draw, is_cpu=model.device.type == "cpu")
        self._keeps_cache = options.kv_cache == "keep"
        self._stale = StaleRows(model, self._batch, chunk_tokens=self._chunk_tokens)
        self._finished: list[FinishedRequest] = []

    @property
    def running(self) -> int:
        """Requests that are neither returned nor cancelled."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that have drawn nothing yet."""
        return len(self._waiting) + sum(not running.is_cancelled for running in self._being_read)

    @property
    def held_bytes(self) -> int:
        """Memory of all caches."""
        prompts = 0 if self._reading is None else self._reading.cache.held_bytes
        return self._batch.held_bytes + self._stale.held_bytes + prompts

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; RefusedError (OVER_LIMIT) if it would never fit in memory."""
        running = RunningRequest(request, request.prompt_token_ids.tolist())
        self._budget.check(running)
        self._running[request.request_id] = running
        self._waiting.append(running)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests; ignore those not running."""
        for request_id in request_ids:
            if (running := self._running.pop(request_id, None)) is not None:
                running.is_cancelled = True
        self._waiting = deque(running for running in self._waiting if not running.is_cancelled)
        if all(running.is_cancelled for running in self._being_read):
            self._being_read, self._reading = [], None
        self._drop_ended()

    def cancel_all(self) -> None:
        """Forget every request."""
        self.cancel(list(self._running))

    def step(self) -> list[FinishedRequest]:
        """Read a chunk, draw a token for each row of the batch; return the requests found finished.

        Prompts are read first: they are few tokens for many rows, and the probe of a new version is one.
        """
        left = self._chunk_tokens - self._read_prompts()
        self._stale.read(left, most_rows=len(requests_of(self._rows)))
        has_rows = bool(self._batch.rows)
        if has_rows:
            self._batch.draw(version=self._version)
        self._read_drawn(newest_too=not has_rows)
        finished, self._finished = self._finished, []
        return finished

    def serve(self, version: int) -> None:
        """Draw from ``version`` from now on: the model's weights are its."""
        self._version = version
        if self._keeps_cache:
            return
        self._read_drawn(newest_too=True)
        self._stale.take_batch()
        if self._reading is not None:
            self._reading = self._reading_of(self._being_read)

    @property
    def _rows(self) -> list[Row]:
        return [*self._batch.rows, *self._stale.rows]

    def _read_prompts(self) -> int:
        """Read a chunk of prompts; return how many tokens it had."""
        if self._reading is None:
            self._being_read = self._admitted()
            if not self._being_read:
                return 0
            self._reading = self._reading_of(self._being_read)
        tokens = self._reading.read_chunk(self._chunk_tokens)
        if self._reading.is_done:
            prompts = [
                (number, running)
                for number, running in enumerate(self._being_read)
                if not running.is_cancelled
            ]
            at = [number for number, running in prompts for _ in range(running.request.completions)]
            rows = [row for _, running in prompts for row in running.rows(self._tokenizer.decode_window)]
            self._batch.join(rows, cache=self._reading.cache, at=at)
            self._being_read, self._reading = [], None
        return tokens

    def _admitted(self) -> list[RunningRequest]:
        """Dequeue, in order, the requests that fit beside those running."""
        taken = requests_of(self._rows)
        running = len(taken)
        while self._waiting and self._budget.has_room([*taken, self._waiting[0]]):
            taken.append(self._waiting.popleft())
        return taken[running:]

    def _reading_of(self, requests: Sequence[RunningRequest]) -> TokenReading:
        """Return what reads all but the last token of each prompt, which is the input of the first step."""
        return TokenReading(self._model, [running.prompt[:-1] for running in requests])

    def _read_drawn(self, *, newest_too: bool) -> None:
        """Take note of what was drawn, and drop the rows that this ended."""
        for row in self._batch.read(self._tokenizer.end_ids, newest_too=newest_too):
            if row.finish is not None:
                self._hand_back(row.running)
        self._drop_ended()

    def _drop_ended(self) -> None:
        self._batch.drop_ended()
        self._stale.drop_ended()

    def _hand_back(self, running: RunningRequest) -> None:
        request_id = running.request.request_id
        if self._running.get(request_id) is running and (finished := running.finished()) is not None:
            del self._running[request_id]
            self._finished.append(finished)


class StaleRows:
    """Running rows whose keys and values older weights computed, on their way back into the batch.

        serve -> stale -> being read: the prompts once each, then the completions -> rows of the batch
                 shortest first                                                      draw again

    A row draws nothing until it has been read again. Rows with the fewest tokens are read first, which keeps
    the fewest waiting. Rows that are still stale when the next version comes are read before all others, so
    that none waits for ever where versions come faster than rows can be read.
    """

    def __init__(self, model: CachedModel, batch: DecodeBatch, *, chunk_tokens: int) -> None:
        """Start without rows."""
        self._model = model
        self._batch = batch
        self._chunk_tokens = chunk_tokens
        self._waiting: list[Row] = []
        self._being_read: list[Row] = []
        """Rows of one length, so that a prompt is read once for all of its rows."""
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
        """Read up to ``tokens`` tokens of rows that fit beside the batch, at least half a chunk."""
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
