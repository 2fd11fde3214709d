"""Requests from the queue to their last token.

    add -> waiting -> being read, a chunk per step -> rows of the batch -> finished
           for memory                                 drawn, read back
                         being read again, likewise <-- at a new version

The queue has no bound of its own: the sampler has no more requests than ``sampler.concurrency_groups``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.decode_batch import DecodeBatch
from sampler.engines.decoding.kv_cache import GROWTH_COLUMNS
from sampler.engines.decoding.memory_budget import MemoryBudget
from sampler.engines.decoding.readback import Readback, ReadDrawn
from sampler.engines.decoding.rows import Row, RunningRequest, requests_of
from sampler.engines.decoding.stale_rows import StaleRows
from sampler.engines.decoding.token_reading import TokenReading
from sampler.engines.engine import FinishedRequest, GenerationRequest


class Decoder:
    """Completes requests step by step; see ``sampler.engines.engine.Engine``."""

    def __init__(
        self,
        model: CachedModel,
        *,
        draw: Callable[[Tensor], Tensor],
        end_ids: frozenset[int],
        decode: Callable[[list[int]], str],
        chunk_tokens: int,
        memory_bytes: int | None,
        keeps_cache: bool,
        is_cpu: bool,
    ) -> None:
        """Start without requests.

        Args:
            draw: Returns a token of each row, [rows], from their log-probabilities, [rows, vocabulary].
            end_ids: Tokens that end a completion.
            decode: Returns the text of a few tokens, without special ones.
            chunk_tokens: Read in one forward pass, padding included.
            memory_bytes: For caches; None: no bound.
            keeps_cache: Go on with the keys and values of older versions.
            is_cpu: Read what was drawn at once, and keep rows in the order in which they came.
        """
        self._model = model
        self._end_ids = end_ids
        self._decode = decode
        self._chunk_tokens = chunk_tokens
        self._budget = MemoryBudget(
            memory_bytes, token_bytes=model.cache_bytes(), spare_columns=GROWTH_COLUMNS
        )
        self._version = 0
        self._running: dict[str, RunningRequest] = {}
        self._waiting: deque[RunningRequest] = deque()
        self._being_read: list[RunningRequest] = []
        self._reading: TokenReading | None = None
        self._batch = DecodeBatch(model, draw, keeps_order=is_cpu)
        self._keeps_cache = keeps_cache
        self._stale = StaleRows(model, self._batch, chunk_tokens=chunk_tokens)
        self._readback = Readback(depth=0 if is_cpu else 1)
        self._finished: list[FinishedRequest] = []

    @property
    def running(self) -> int:
        """How many requests are neither returned nor cancelled."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many of them have drawn nothing yet."""
        return len(self._waiting) + sum(not running.is_cancelled for running in self._being_read)

    @property
    def held_bytes(self) -> int:
        """Memory of all caches."""
        prompts = 0 if self._reading is None else self._reading.cache.held_bytes
        return self._batch.held_bytes + self._stale.held_bytes + prompts

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RefusedError: OVER_LIMIT if it would never fit in memory.
        """
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
        rows = self._batch.rows
        if rows:
            self._readback.put(self._batch.draw(), rows, version=self._version)
        self._note(self._readback.take(all_of_them=not rows))
        finished, self._finished = self._finished, []
        return finished

    def serve(self, version: int) -> None:
        """Draw from ``version`` from now on: the model's weights are its."""
        self._version = version
        if self._keeps_cache:
            return
        self._note(self._readback.take(all_of_them=True))
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
            rows = [row for _, running in prompts for row in running.rows(self._decode)]
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

    def _note(self, steps: Iterable[ReadDrawn]) -> None:
        """Append to each row what was drawn for it, and drop the rows that this ended."""
        for step in steps:
            drawn = zip(step.rows, step.token_ids, step.logprobs, step.kept_masses, strict=True)
            for row, token, logprob, kept_mass in drawn:
                row.append(token, logprob, kept_mass, version=step.version, end_ids=self._end_ids)
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
