"""The remote engine: a vLLM server that its user runs generates; this process keeps it in step with the run.

    add --HTTP--> the server's queue -> its batch --HTTP, once all its completions are there--> finished

The server generates by itself, also between two calls of ``step``. It is paused before the first word of a
version is written, and goes on when that version is served, so that each token is drawn from one version,
which it names. A server that is gone, silent, stuck, or that answers what cannot be, is an engine that
failed: it is connected to again, and the version restored from the disk. Nothing here starts or ends it.
"""

import asyncio
import queue
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from node.errors import StartupError
from sampler.engines.engine import TEXT_PROBE, EngineSettings, EngineUse, GenerationRequest, check_fits
from sampler.engines.engine_options import RemoteOptions
from sampler.engines.remote.server_session import ServerSession
from sampler.engines.remote.vllm_server import ServerError
from sampler.engines.text.model_tokenizer import ModelTokenizer
from sampler.engines.vllm.model_directory import DeclaredTensors
from sampler.engines.words.shared_words import SharedWords

LOOK_S: Final = 10.0
"""How often a server is asked for its progress, unless a request has no token yet: then in every step."""

GAUGES_S: Final = 1.0
"""How often a server is asked how full it is."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request at the server."""

    number: int
    wanted: int
    answer: "Future[GenerationRequest]"
    has_begun: bool = False


class RemoteEngine:
    """See ``sampler.engines.engine.Engine``."""

    probe: Final = TEXT_PROBE

    def __init__(self, settings: EngineSettings) -> None:
        """Connect to the server once it has started; StartupErrors as of ``ServerSession``."""
        if settings.apply == "spare":
            raise StartupError(
                "the remote engine has new versions written over the old one",
                fix='Leave sampler.apply out, or set sampler.apply = "in_place".',
            )
        model_dir, seed = settings.model_dir, settings.seed
        self._options = options = RemoteOptions.model_validate(settings.engine_options)
        self._running: dict[str, _Running] = {}
        self._ended: queue.SimpleQueue[tuple[str, _Running]] = queue.SimpleQueue()
        self._requests = 0
        self._version = 0
        self.use = EngineUse()
        self.tokenizer = ModelTokenizer(model_dir)
        try:
            self.layout = DeclaredTensors.of(model_dir).layout
        except (OSError, ValueError) as error:
            raise StartupError(
                f"{model_dir} holds no model that can be used: {error}", fix="Correct sampler.model_dir."
            ) from error
        self._session = ServerSession(
            options,
            layout=self.layout,
            tokenizer=self.tokenizer,
            compute_dtype=settings.compute_dtype,
            seed=secrets.randbits(31) if seed is None else seed % (1 << 31),
        )
        self._counts: Mapping[str, int] = {}
        self._looked_at_s = self._moved_at_s = self._gauged_at_s = time.monotonic()

    @property
    def weights(self) -> SharedWords:
        return self._session.words

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return sum(not running.has_begun for running in list(self._running.values()))

    def add(self, request: GenerationRequest) -> None:
        larger = "start the server with a larger --max-model-len"
        check_fits(request, self._session.context_tokens, what="the server", or_raise=larger)
        if not self._running:
            self._moved_at_s = time.monotonic()
        self._requests += 1
        answer = self._session.server.start(self._finished(request, self._requests))
        running = _Running(self._requests, request.wanted, answer)
        self._running[request.request_id] = running
        answer.add_done_callback(lambda _: self._ended.put((request.request_id, running)))

    def cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (running := self._running.pop(request_id, None)) is not None:
                running.answer.cancel()
        if not request_ids:
            self._look()

    def step(self) -> list[GenerationRequest]:
        if not self._running:
            return []
        finished = []
        with suppress(queue.Empty):
            ended = self._ended.get(timeout=self._options.poll_s)
            while True:
                request_id, running = ended
                if self._running.get(request_id) is running:
                    del self._running[request_id]
                    finished.append(running.answer.result())
                ended = self._ended.get_nowait()
        now = time.monotonic()
        if self.waiting or now - self._looked_at_s >= LOOK_S:
            self._look()
        if now - self._gauged_at_s >= GAUGES_S:
            self.use, self._gauged_at_s = self._use(), now
        return finished

    def serve(self, version: int) -> None:
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}, which is being served")
        self._session.pause()
        self._version = version
        self._session.resume(version)
        self._moved_at_s = time.monotonic()

    def close(self) -> None:
        self._running = {}
        self._session.close()

    def _use(self) -> EngineUse:
        """Ask the server how full it is; where it does not tell, take what is asked of it."""
        gauges, wanted = (
            self._session.server.gauges(),
            sum(running.wanted for running in self._running.values()),
        )
        drawn, waiting = gauges.get("num_requests_running", wanted), gauges.get("num_requests_waiting", 0.0)
        return EngineUse.of(
            places_share=(drawn + waiting) / self._session.batch,
            waiting=waiting,
            wanted=wanted,
            cache_share=gauges.get("kv_cache_usage_perc", 0.0),
        )

    def _look(self) -> None:
        """See which requests have a token; ServerError if the server draws none."""
        counts = self._session.count_tokens()
        self._looked_at_s = time.monotonic()
        for running in self._running.values():
            running.has_begun |= counts.get(str(running.number), 0) > 0
        if counts != self._counts or not self._running or self._session.is_paused:
            self._counts, self._moved_at_s = counts, self._looked_at_s
        elif self._looked_at_s - self._moved_at_s > self._options.answer_limit_s:
            raise ServerError(
                f"{self._options.address} drew no token for {len(self._running)} requests within "
                f"{self._options.answer_limit_s:g} s"
            )

    async def _finished(self, request: GenerationRequest, number: int) -> GenerationRequest:
        """Ask for the completions of a request, as many at once as the server batches."""
        batch = self._session.batch
        parts = await asyncio.gather(
            *(
                self._session.completions(request, count=min(batch, request.wanted - first), number=number)
                for first in range(0, request.wanted, batch)
            )
        )
        return replace(request, completions=tuple(drawn for part in parts for drawn in part))
