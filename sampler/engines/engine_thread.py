"""The thread an engine runs on: decode steps, and between them new weights, new requests and cancellations.

    hand_over --.                     .-- finished
    add --------+--> between steps -->|
    cancel -----'        step         '-- refused

A version is handed over as a change of the engine's live words. The caller waits until the change is made, so
at most one is pending. After a change that fails, the live words are no version, and nothing is sampled until
another change succeeds.

Every version is probed: a fixed prompt is completed by one token along with the requests. An engine that
raises, or that draws the probe with no finite logprob, is closed and loaded again; its requests and its words
are lost. A version that fails two probes is not sampled from.

A call that takes longer than the limit hangs. An engine in a process of its own is then killed, and fails
like any other. One inside this process cannot be ended: its thread is abandoned, and the sampler ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from node.errors import Reason, RefusedError
from node.policy import PolicyVersion
from node.process.abandoned_threads import abandon
from node.rollout import SamplingParameters
from sampler.engines.engine import FinishedRequest, GenerationRequest
from sampler.engines.restartable_engine import FAULTS, EngineEndedError, EngineFaultError, RestartableEngine
from sampler.metrics import SamplerMetrics

logger = logging.getLogger(__name__)

RESTARTS: Final = 3
"""Faults of the engine without a finished request in between that are answered by a restart. What three do
not mend, such as a broken CUDA context, a new process may."""

IDLE_CHECK_S: Final = 10.0
"""How often an engine with nothing to do is asked whether it still answers."""

_PROBE_ID: Final = "probe"
_PROBE: Final = np.arange(4, dtype=np.int32)
_PROBE_SAMPLING: Final = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1)

Result = TypeVar("Result")

Change = Callable[[], PolicyVersion | None]
"""Changes the live words between two steps and returns their version; None: do not sample from them."""


class EngineHungError(EngineFaultError):
    """A call of the engine does not return, and nothing can end it but the end of the process."""


@dataclass(slots=True, eq=False)
class _Offer:
    change: Change
    made: "asyncio.Future[PolicyVersion | None]"


class EngineThread:
    """Drives an engine while ``run`` runs. All methods are for the event loop's thread.

    Attributes:
        served: The version the next step samples from; None while what the engine holds is in doubt.
    """

    def __init__(
        self,
        engine: RestartableEngine,
        *,
        step_limit_s: float | None,
        metrics: SamplerMetrics,
        lost: Callable[[], None],
    ) -> None:
        """Drive ``engine``.

        Args:
            step_limit_s: Longest time of a call; None: the engine sees to that itself.
            lost: Called when the engine has failed and its words will be the base model's.
        """
        self._engine = engine
        self._step_limit_s = step_limit_s
        self._metrics = metrics
        self._lost = lost
        self._offered: _Offer | None = None
        self._is_serving = asyncio.Event()
        self._added: list[GenerationRequest] = []
        self._cancelled: list[str] = []
        self._something_to_do = asyncio.Event()
        self._faults = 0
        """Since a request was finished."""
        self._is_hung = False
        self._suspect: PolicyVersion | None = None
        """The version whose probe has failed once."""
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
        self,
        *,
        finished: Callable[[FinishedRequest], None],
        refused: Callable[[str, RefusedError], None],
        failed: Callable[[], None],
    ) -> None:
        """Generate until cancelled, then close the engine, once the current step has ended.

        Args:
            finished: Called with each request whose completions are all there.
            refused: Called with the id of each request the engine refuses.
            failed: Called when what was added and is not finished is lost.
        Raises:
            EngineFaultError: the engine fails again and again, or hangs and cannot be ended.
            ConfigError, StartupError: it does not load any more.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        try:
            while True:
                self._something_to_do.clear()
                try:
                    if await self._turn(thread, finished=finished, refused=refused, failed=failed):
                        await self._idle(thread)
                except EngineHungError:
                    raise
                except EngineFaultError as error:
                    await self._restart(error, thread, failed=failed)
        finally:
            await self._close(thread)

    async def _turn(
        self,
        thread: ThreadPoolExecutor,
        *,
        finished: Callable[[FinishedRequest], None],
        refused: Callable[[str, RefusedError], None],
        failed: Callable[[], None],
    ) -> bool:
        """Do what there is to do, up to one step; return whether there was nothing to step."""
        if self._offered is not None:
            offer, self._offered = self._offered, None
            await self._make(offer, thread)
        if self._added or self._cancelled:
            added, self._added = self._added, []
            cancelled, self._cancelled = self._cancelled, []
            for refusal in await self._in(thread, lambda: self._pass_on(added, cancelled)):
                refused(*refusal)
        if not self._engine.running or self.served is None:
            return True
        done = {request.request_id: request for request in await self._in(thread, self._step)}
        probe = done.pop(_PROBE_ID, None)
        if probe is not None and not self._has_passed(probe):
            failed()
            return False
        for request in done.values():
            self._faults = 0
            finished(request)
        return False

    async def _idle(self, thread: ThreadPoolExecutor) -> None:
        """Wait for something to do, but not for longer than until the engine is to be looked after."""
        try:
            async with asyncio.timeout(IDLE_CHECK_S):
                await self._something_to_do.wait()
        except TimeoutError:
            await self._in(thread, lambda: self._engine.cancel([]))

    async def _close(self, thread: ThreadPoolExecutor) -> None:
        if self._is_hung:
            thread.shutdown(wait=False)
            abandon("engine")
            return
        closing = asyncio.get_running_loop().run_in_executor(thread, self._engine.close)
        thread.shutdown(wait=False)
        try:
            await asyncio.wait({closing}, timeout=self._step_limit_s)
        finally:
            if not closing.done():
                abandon("engine")

    def _has_passed(self, probe: FinishedRequest) -> bool:
        """Return whether the probe has finite logprobs; if not, the version is not served any more.

        Raises:
            EngineFaultError: it has not, for the first time with this version.
        """
        version = self.served
        if version is None or np.isfinite(probe.completions[0].behaviour_logprob).all():
            return True
        self._metrics.probe_failures.inc()
        if version != self._suspect:
            self._suspect = version
            raise EngineFaultError(f"the probe of version {version.number} has no finite logprob")
        logger.error("version not sampled from: no finite logprobs", extra={"version": version.number})
        self.withdraw()
        return False

    async def _restart(
        self, error: EngineFaultError, thread: ThreadPoolExecutor, *, failed: Callable[[], None]
    ) -> None:
        self._faults += 1
        self.withdraw()
        self._added.clear()
        self._lost()
        failed()
        # The next engine knows none of them, and the hub may lease them to this sampler again.
        self._cancelled.clear()
        if self._faults > RESTARTS:
            raise error
        self._metrics.engine_restarts.inc()
        logger.error("engine failed, loading it again", extra={"faults": self._faults}, exc_info=error)
        await asyncio.get_running_loop().run_in_executor(thread, self._engine.restart)

    async def _make(self, offer: _Offer, thread: ThreadPoolExecutor) -> None:
        try:
            version = await self._in(thread, lambda: self._change(offer.change))
        except RefusedError as error:
            self.withdraw()
            if not offer.made.done():
                offer.made.set_exception(error)
            return
        except EngineFaultError as error:
            if not offer.made.done():
                offer.made.set_exception(RefusedError(Reason.DAMAGED, str(error)))
            raise
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
            self._engine.cancel([_PROBE_ID])
            self._engine.add(GenerationRequest(_PROBE_ID, _PROBE, 1, _PROBE_SAMPLING))
            self._metrics.swap_seconds.observe(time.perf_counter() - started)
        return version

    def _pass_on(
        self, added: Sequence[GenerationRequest], cancelled: Sequence[str]
    ) -> list[tuple[str, RefusedError]]:
        refusals = []
        for request in added:
            try:
                self._engine.add(request)
            except EngineEndedError:
                raise
            except RefusedError as error:
                refusals.append((request.request_id, error))
        self._engine.cancel(cancelled)
        return refusals

    async def _in(self, thread: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
        """Call the engine in its thread.

        Raises:
            EngineFaultError: it failed.
            EngineHungError: it did not return in time.
        """

        def guarded() -> Result:
            try:
                return call()
            except (EngineEndedError, *FAULTS) as error:
                raise EngineFaultError(f"the engine failed: {error!r}") from error

        calling = asyncio.get_running_loop().run_in_executor(thread, guarded)
        try:
            await asyncio.wait({calling}, timeout=self._step_limit_s)
        except asyncio.CancelledError:
            calling.cancel()
            raise
        if not calling.done():
            self._is_hung = True
            raise EngineHungError(
                f"a step took longer than engine_step_limit_s = {self._step_limit_s:g}, and an engine "
                "inside this process cannot be ended alone"
            )
        return calling.result()

    def _step(self) -> list[FinishedRequest]:
        started = time.perf_counter()
        finished = self._engine.step()
        self._metrics.decode_steps.inc()
        self._metrics.generate_seconds.inc(time.perf_counter() - started)
        return finished
