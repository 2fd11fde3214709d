"""The engine's thread: between two decode steps it takes new weights, new requests, cancellations.

    hand_over --.                     .-- finished
    add --------+--> between steps -->|
    cancel -----'        step         '-- refused

A version is handed over by rendezvous: the caller waits until it is served, so there is never more
than one on its way and the arrays of the version before are free again.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from node.errors import RefusedError
from node.policy import PolicyVersion
from node.weights.held import HeldPolicy
from sampler.engines.base import Engine, FinishedRequest, GenerationRequest
from sampler.metrics import SamplerMetrics


class Generation:
    """Drives an engine for as long as ``run`` runs. Call everything on the event loop's thread.

    Attributes:
        served: The version the next step samples from; None: what the engine holds is in doubt.
    """

    def __init__(self, engine: Engine, *, metrics: SamplerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._offered: HeldPolicy | None = None
        self._is_loaded = asyncio.Event()
        self._is_serving = asyncio.Event()
        self._added: list[GenerationRequest] = []
        self._cancelled: list[str] = []
        self._something_to_do = asyncio.Event()
        self.served: PolicyVersion | None = None
        metrics.held_version.set(-1)

    async def hand_over(self, policy: HeldPolicy) -> None:
        """Serve ``policy`` from the next step on; return when it is. Its words are not copied before."""
        self._offered = policy
        self._is_loaded.clear()
        self._something_to_do.set()
        await self._is_loaded.wait()

    def withdraw(self) -> None:
        """Serve nothing until the next version is handed over. Cancel what is running yourself."""
        self.served = None
        self._is_serving.clear()
        self._metrics.held_version.set(-1)

    async def wait_until_serving(self) -> PolicyVersion:
        """Wait for a version to sample from and give it."""
        while self.served is None:
            await self._is_serving.wait()
        return self.served

    def add(self, request: GenerationRequest) -> None:
        """Generate; the answer is a call of ``finished`` or ``refused``."""
        self._added.append(request)
        self._something_to_do.set()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests before the next step."""
        self._cancelled += request_ids
        self._something_to_do.set()

    async def run(
        self, *, finished: Callable[[FinishedRequest], None], refused: Callable[[str, RefusedError], None]
    ) -> None:
        """Generate until cancelled; a step under way then ends by itself.

        Args:
            finished: Told of each request whose completions are all there.
            refused: Told of each request the engine will not take.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as thread:
            loop = asyncio.get_running_loop()
            while True:
                self._something_to_do.clear()
                if self._offered is not None:
                    policy, self._offered = self._offered, None
                    await loop.run_in_executor(thread, self._load, policy)
                    self._serve(policy.version)
                self._pass_on(refused)
                if self._engine.running:
                    for request in await loop.run_in_executor(thread, self._step):
                        finished(request)
                else:
                    await self._something_to_do.wait()

    def _pass_on(self, refused: Callable[[str, RefusedError], None]) -> None:
        added, self._added = self._added, []
        for request in added:
            try:
                self._engine.add(request)
            except RefusedError as error:
                refused(request.request_id, error)
        cancelled, self._cancelled = self._cancelled, []
        self._engine.cancel(cancelled)

    def _serve(self, version: PolicyVersion) -> None:
        self.served = version
        self._metrics.held_version.set(version.number)
        self._is_serving.set()
        self._is_loaded.set()

    def _load(self, policy: HeldPolicy) -> None:
        started = time.perf_counter()
        self._engine.load(policy.words, policy.version.number)
        self._metrics.swap_seconds.observe(time.perf_counter() - started)

    def _step(self) -> list[FinishedRequest]:
        started = time.perf_counter()
        finished = self._engine.step()
        self._metrics.decode_steps.inc()
        self._metrics.generate_seconds.inc(time.perf_counter() - started)
        return finished
