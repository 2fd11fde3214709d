"""The thread an engine runs on: decode steps, and between them new weights, new requests and cancellations.

    hand_over --.                     .-- finished
    add --------+--> between steps -->|
    cancel -----'        step         '-- refused

A version is handed over as a change of the engine's live words. The caller waits until the change is made, so
at most one is pending. After a change that fails, the live words are no version, and nothing is sampled until
another change succeeds.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from node.errors import RefusedError
from node.policy import PolicyVersion
from sampler.engines.engine import Engine, FinishedRequest, GenerationRequest
from sampler.metrics import SamplerMetrics

Change = Callable[[], PolicyVersion | None]
"""Changes the live words between two steps and returns their version; None: do not sample from them."""


@dataclass(slots=True, eq=False)
class _Offer:
    change: Change
    made: "asyncio.Future[PolicyVersion | None]"


class EngineThread:
    """Drives an engine while ``run`` runs. All methods are for the event loop's thread.

    Attributes:
        served: The version the next step samples from; None while what the engine holds is in doubt.
    """

    def __init__(self, engine: Engine, *, metrics: SamplerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._offered: _Offer | None = None
        self._is_serving = asyncio.Event()
        self._added: list[GenerationRequest] = []
        self._cancelled: list[str] = []
        self._something_to_do = asyncio.Event()
        self.served: PolicyVersion | None = None
        metrics.held_version.set(-1)
        metrics.watch_engine(waiting=lambda: engine.waiting)

    async def hand_over(self, change: Change) -> PolicyVersion | None:
        """Run ``change`` before the next step; return the version served from then on.

        Raises:
            RefusedError: the change failed; nothing is served.
        """
        self._offered = _Offer(change, asyncio.get_running_loop().create_future())
        self._something_to_do.set()
        return await self._offered.made

    def withdraw(self) -> None:
        """Serve nothing until the next version is handed over. Running requests are left to the caller."""
        self.served = None
        self._is_serving.clear()
        self._metrics.held_version.set(-1)

    async def wait_until_serving(self) -> PolicyVersion:
        """Wait for a version to sample from and return it."""
        while self.served is None:
            await self._is_serving.wait()
        return self.served

    def add(self, request: GenerationRequest) -> None:
        """Generate; the answer is a call of ``finished`` or ``refused``."""
        self._added.append(request)
        self._something_to_do.set()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests before the next step that begins."""
        self._cancelled += request_ids
        self._something_to_do.set()

    async def run(
        self, *, finished: Callable[[FinishedRequest], None], refused: Callable[[str, RefusedError], None]
    ) -> None:
        """Generate until cancelled, then close the engine, once the current step has ended.

        Args:
            finished: Called with each request whose completions are all there.
            refused: Called with the id of each request the engine refuses.
        """
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as thread:
            try:
                while True:
                    self._something_to_do.clear()
                    if self._offered is not None:
                        offer, self._offered = self._offered, None
                        await self._make(offer, thread)
                    if self._added or self._cancelled:
                        added, self._added = self._added, []
                        cancelled, self._cancelled = self._cancelled, []
                        for refusal in await loop.run_in_executor(thread, self._pass_on, added, cancelled):
                            refused(*refusal)
                    if self._engine.running and self.served is not None:
                        for request in await loop.run_in_executor(thread, self._step):
                            finished(request)
                    else:
                        await self._something_to_do.wait()
            finally:
                thread.submit(self._engine.close).result()

    async def _make(self, offer: _Offer, thread: ThreadPoolExecutor) -> None:
        try:
            version = await asyncio.get_running_loop().run_in_executor(thread, self._change, offer.change)
        except RefusedError as error:
            self.withdraw()
            if not offer.made.done():
                offer.made.set_exception(error)
            return
        if version is None:
            self.withdraw()
        else:
            self.served = version
            self._metrics.held_version.set(version.number)
            self._is_serving.set()
        if not offer.made.done():
            offer.made.set_result(version)

    def _change(self, change: Change) -> PolicyVersion | None:
        started = time.perf_counter()
        version = change()
        if version is not None:
            self._engine.serve(version.number)
            self._metrics.swap_seconds.observe(time.perf_counter() - started)
        return version

    def _pass_on(
        self, added: Sequence[GenerationRequest], cancelled: Sequence[str]
    ) -> list[tuple[str, RefusedError]]:
        refusals = []
        for request in added:
            try:
                self._engine.add(request)
            except RefusedError as error:
                refusals.append((request.request_id, error))
        self._engine.cancel(cancelled)
        return refusals

    def _step(self) -> list[FinishedRequest]:
        started = time.perf_counter()
        finished = self._engine.step()
        self._metrics.decode_steps.inc()
        self._metrics.generate_seconds.inc(time.perf_counter() - started)
        return finished
