"""The torch engine: a transformers causal language model, each running completion one row of a batch.

    add -> waiting -> being read, a chunk per step -> rows of the batch -> finished
           for memory                                 drawn, read back
                         being read again <-- at a new version

The cache covers all but the last token of a row, which is the input of the next step. After new weights in
mid-generation, running rows are read again from prompt and generated tokens, a chunk between two steps, and
every later logprob is exactly that of the new weights (``kv_cache = "recompute"``). Rows already read again
draw on meanwhile. Or rows go on with the keys and values they have (``"keep"``): a logprob is still that of
the distribution its token was drawn from, by the weights of the version it names, but over keys and values of
older ones, so that no version alone reproduces it.

Nothing is uploaded or waited for per token: the CPU prepares a step while the device computes the one before.
So what a step finishes is found one step late on a CUDA device, and at once on a CPU. The queue has no bound
of its own: the sampler adds as many requests as its work queue lets it.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM

from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.decode_batch import DecodeBatch
from sampler.engines.decoding.kv_cache import GROWTH_COLUMNS
from sampler.engines.decoding.row_reader import RowReader
from sampler.engines.decoding.rows import MemoryBudget, RunningRequest, requests_of
from sampler.engines.decoding.sampling import by_inverse, by_noise
from sampler.engines.engine import (
    CPU_ROWS,
    GPU_ROWS,
    TEXT_PROBE,
    EngineSettings,
    EngineUse,
    GenerationRequest,
    check_fits,
)
from sampler.engines.engine_options import TorchOptions
from sampler.engines.torch.live_model import LiveModel, dtype_of

_CACHE_SHARE: Final = 0.8
"""Share of the free memory; activations, logits and what the allocator cannot use have the rest."""


def load(settings: EngineSettings) -> "TorchEngine":
    """Load the engine that ``sampler.engine = "torch"`` names; see ``TorchEngine``."""
    return TorchEngine(
        settings.model_dir,
        device=settings.device,
        compute_dtype=dtype_of(settings),
        threads=settings.threads,
        seed=settings.seed,
        options=TorchOptions.model_validate(settings.engine_options),
        has_spare=settings.apply != "in_place",
    )


class TorchEngine:
    """See ``sampler.engines.engine.Engine``."""

    probe: Final = TEXT_PROBE

    def __init__(
        self,
        model_dir: Path,
        *,
        device: str,
        compute_dtype: torch.dtype,
        threads: int,
        seed: int | None,
        options: TorchOptions | None = None,
        has_spare: bool = False,
    ) -> None:
        """Load the base model, rounded to the dtypes of its files, as version 0.

        Args:
            model_dir, device, compute_dtype, threads, seed: As of ``LiveModel.load``.
            has_spare: Whether room for a second copy of the weights is to be left.
        Raises:
            StartupError: the directory holds no such model, or this machine lacks the device.
        """
        loaded = LiveModel.load(
            AutoModelForCausalLM,
            model_dir,
            device=device,
            compute_dtype=compute_dtype,
            threads=threads,
            seed=seed,
        )
        self.tokenizer, self.layout, self.weights = loaded.tokenizer, loaded.layout, loaded.weights
        self._model = loaded.model
        self._version = 0
        self.use = EngineUse()
        self._running: dict[str, RunningRequest] = {}
        self._waiting: deque[RunningRequest] = deque()
        self._finished: list[GenerationRequest] = []
        options = options or TorchOptions()
        self._keeps_cache = options.kv_cache == "keep"
        self._chunk_tokens = chunk_tokens = options.prefill_chunk_tokens
        draw = partial(by_inverse if options.draw == "inverse" else by_noise, generator=loaded.generator)
        with torch.inference_mode():
            cached = CachedModel(self._model)
            self._batch = DecodeBatch(cached, draw, is_cpu=cached.device.type == "cpu")
            self._prompts = RowReader(cached, self._batch, chunk_tokens=chunk_tokens)
            self._stale = RowReader(cached, self._batch, chunk_tokens=chunk_tokens)
            memory_bytes = options.memory_bytes or self._free_bytes(has_spare=has_spare)
            self._budget = MemoryBudget(memory_bytes, cached.cache_bytes(), spare_columns=GROWTH_COLUMNS)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        being_read = requests_of(self._prompts.rows)
        return len(self._waiting) + sum(not running.is_cancelled for running in being_read)

    @property
    def cache_bytes(self) -> int:
        """Memory of all caches."""
        return self._batch.held_bytes + self._stale.held_bytes + self._prompts.held_bytes

    def add(self, request: GenerationRequest) -> None:
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        check_fits(request, limit)
        running = RunningRequest(request, request.prompt_token_ids.tolist())
        self._budget.check(running)
        self._running[request.request_id] = running
        self._waiting.append(running)

    @torch.inference_mode()
    def cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (running := self._running.pop(request_id, None)) is not None:
                running.is_cancelled = True
        self._waiting = deque(running for running in self._waiting if not running.is_cancelled)
        self._drop_ended()

    @torch.inference_mode()
    def step(self) -> list[GenerationRequest]:
        # Prompts are read first: they are few tokens for many rows, and the probe of a new version is one.
        if not self._prompts.rows:
            self._admit()
        read = self._prompts.read(self._chunk_tokens, most_rows=len(self._prompts.rows))
        rows = [*self._batch.rows, *self._stale.rows]
        self._stale.read(self._chunk_tokens - read, most_rows=len(requests_of(rows)))
        has_rows = bool(self._batch.rows)
        if has_rows:
            self._batch.draw(version=self._version)
        self._read_drawn(newest_too=not has_rows)
        self.use = self._use()
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()
    def serve(self, version: int) -> None:
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}, which is being served")
        self._version = version
        if not self._keeps_cache:
            self._read_drawn(newest_too=True)
            self._stale.begin_again()
            self._stale.queue(sorted(self._batch.take_all(), key=lambda row: len(row.token_ids)))
            self._prompts.begin_again()

    def close(self) -> None:
        self.cancel(list(self._running))
        with torch.inference_mode():
            self._model.to("meta")  # type: ignore[arg-type]
        del self.weights

    def _admit(self) -> None:
        """Begin to read, in order, the requests that fit in memory beside those running."""
        taken = requests_of([*self._batch.rows, *self._stale.rows])
        while self._waiting and self._budget.has_room([*taken, self._waiting[0]]):
            taken.append(running := self._waiting.popleft())
            self._prompts.queue(running.rows(self.tokenizer.decode_window))

    def _use(self) -> EngineUse:
        requests = list(self._running.values())
        most_rows = CPU_ROWS if self._model.device.type == "cpu" else GPU_ROWS
        rows = sum(running.request.wanted - len(running.done) for running in requests)
        unread = sum(running.request.wanted for running in self._waiting) + len(self._prompts.rows)
        return EngineUse.of(
            places_share=max(rows / most_rows, self._budget.share(requests)),
            waiting=unread,
            wanted=sum(running.request.wanted for running in requests),
        )

    def _read_drawn(self, *, newest_too: bool) -> None:
        """Note what was drawn, and drop the rows that this ended."""
        for row in self._batch.read(self.tokenizer.end_ids, newest_too=newest_too):
            request_id = row.running.request.request_id
            if row.finish is None or self._running.get(request_id) is not row.running:
                continue
            if (finished := row.running.finished()) is not None:
                del self._running[request_id]
                self._finished.append(finished)
        self._drop_ended()

    def _drop_ended(self) -> None:
        self._batch.drop_ended()
        self._prompts.drop_ended()
        self._stale.drop_ended()

    def _free_bytes(self, *, has_spare: bool) -> int | None:
        device = self._model.device
        if device.type == "cpu":
            return None
        free, _ = torch.cuda.mem_get_info(device)
        spare = sum(tensor.nbytes for tensor in self._model.parameters()) if has_spare else 0
        return max(0, int(_CACHE_SHARE * (free - spare)))
