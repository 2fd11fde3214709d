"""The thread an engine runs on: decode steps, and between them new weights, new requests and cancellations.

    add, cancel --.                    .-- finished
                  +-- between steps ---+               the thread steps on, and does not wait for the loop
                                       '-- refused
    hand_over -------- between steps                   the thread comes back to the loop first

A version is handed over as a change of the engine's live words. The caller waits until the change is made, so
at most one is pending. After a change that fails, the live words are no version: the served policy is lost.

Every version is probed: the engine's ``probe`` is answered with one action along with the requests. An engine
that raises, or that draws it with no finite logprob, is closed and loaded again; its requests and its words
are lost. A version that fails two probes is not sampled from.

A step or a change that takes longer than the limit hangs. An engine in a process of its own is then killed,
and fails like any other. One inside this process cannot be ended: its thread is abandoned, and the sampler
ends.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np

from node.errors import RefusedError
from node.process.abandoned_threads import abandon
from node.values.groups.sampling_parameters import SamplingParameters
from node.values.policy import PolicyVersion
from sampler.engines.engine import PROBE_ID, EngineUse, GenerationRequest
from sampler.engines.restartable_engine import FAULTS, EngineEndedError, EngineFaultError, RestartableEngine
from sampler.engines.stepping import RequestChange, StepResults, step_on
from sampler.metrics import SamplerMetrics
from sampler.served_policy import Event, ServedPolicy

logger = logging.getLogger(__name__)

RESTARTS: Final = 3
"""Faults of the engine without a finished request in between that are answered by a restart. What three do
not mend, such as a broken CUDA context, a new process may."""

IDLE_CHECK_S: Final = 10.0
"""How often an engine with nothing to do is asked whether it still answers."""

_PROBE_SAMPLING: Final = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1)

Result = TypeVar("Result")

Change = Callable[[], PolicyVersion | None]
"""Changes the live words between two steps and returns their version; None: do not sample from them."""


class EngineHungError(EngineFaultError):
    """A call of the engine does not return, and nothing can end it but the end of the process."""


class EngineThread:
    """Drives an engine while ``run`` runs. Methods are for the event loop's thread.

    ``changes`` and ``tell`` are for the engine's: see ``StepExchange``.
    """

    def __init__(
        self,
        engine: RestartableEngine,
        policy: ServedPolicy,
        *,
        step_limit_s: float | None,
        metrics: SamplerMetrics,
    ) -> None:
        """Drive ``engine`` while ``policy`` serves a version; ``step_limit_s``: None if it bounds itself."""
        self._engine = engine
        self._policy = policy
        self._step_limit_s = step_limit_s
        self._metrics = metrics
        self._offered: tuple[Change, asyncio.Future[PolicyVersion | None]] | None = None
        self._changes: deque[RequestChange] = deque()
        """Filled by the loop and emptied by the thread. As many as the groups in progress."""
        self._told: asyncio.Queue[StepResults | None] = asyncio.Queue()
        """From the thread; None: it has come back. As many as the groups in progress, and those between."""
        self._is_called_back = False
        """Whether the thread takes no further step."""
        self._something_to_do = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._faults = 0
        """Since a request was finished."""
        self._is_hung = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        policy.listen(lambda _: self._note_policy())
        metrics.watch(engine_waiting_requests=lambda: engine.waiting)

    @property
    def use(self) -> EngineUse:
        """How full the engine is."""
        return self._engine.use

    async def hand_over(self, change: Change) -> PolicyVersion | None:
        """Run ``change`` before the next step; RefusedError if it fails: the words are no version then."""
        made: asyncio.Future[PolicyVersion | None] = asyncio.get_running_loop().create_future()
        self._offered = (change, made)
        self._is_called_back = True
        self._something_to_do.set()
        return await made

    def add(self, request: GenerationRequest) -> None:
        """Generate; the answer is a call of ``finished`` or ``refused``."""
        self._changes.append(request)
        self._something_to_do.set()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests as soon as the thread hears of it; those finished by then are returned."""
        self._changes.extend(request_ids)
        self._something_to_do.set()

    async def run(
        self,
        *,
        finished: Callable[[GenerationRequest], None],
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
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                self._something_to_do.clear()
                self._is_called_back = False
                try:
                    if self._offered is not None:
                        offered, self._offered = self._offered, None
                        await self._make(*offered)
                    if self._policy.served is None or not (self._engine.running or self._changes):
                        await self._idle()
                    elif (probe := await self._step(finished, refused)) is not None and self._rejects(probe):
                        failed()
                except EngineHungError:
                    raise
                except EngineFaultError as error:
                    await self._restart(error, failed)
        finally:
            self._is_called_back = True
            await self._close()

    def changes(self, *, running: int) -> Sequence[RequestChange] | None:
        """See ``StepExchange``."""
        if self._is_called_back or not (running or self._changes):
            return None
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def tell(self, results: StepResults) -> None:
        """See ``StepExchange``."""
        self._loop.call_soon_threadsafe(self._told.put_nowait, results)

    def _note_policy(self) -> None:
        self._is_called_back |= self._policy.served is None
        self._something_to_do.set()

    async def _step(
        self, finished: Callable[[GenerationRequest], None], refused: Callable[[str, RefusedError], None]
    ) -> GenerationRequest | None:
        """Step until the thread comes back, and return the answer to the probe if there is one.

        After an answer that is not finite nothing is finished any more.
        """
        probe = None
        async for results in self._results():
            self._metrics.decode_steps.inc(results.steps)
            done = {request.request_id: request for request in results.finished}
            if (answer := done.pop(PROBE_ID, None)) is not None:
                probe, self._is_called_back = answer, True
            if probe is not None and not _is_finite(probe):
                continue
            for refusal in results.refused:
                refused(*refusal)
            for request in done.values():
                self._faults = 0
                finished(request)
        return probe

    async def _results(self) -> AsyncIterator[StepResults]:
        """Start the thread's steps; yield what it tells until it comes back, and raise as ``_call``."""
        stepping = self._start(lambda: step_on(self._engine.current, self))
        stepping.add_done_callback(lambda _: self._told.put_nowait(None))
        try:
            while (results := await self._within_limit(self._told.get())) is not None:
                yield results
            await stepping
        finally:
            stepping.cancel()

    async def _idle(self) -> None:
        """Wait for something to do, but not for longer than until the engine is to be looked after."""
        try:
            async with asyncio.timeout(IDLE_CHECK_S):
                await self._something_to_do.wait()
        except TimeoutError:
            await self._call(lambda: self._engine.cancel([]))

    async def _close(self) -> None:
        if self._is_hung:
            self._thread.shutdown(wait=False)
            abandon("engine")
            return
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._engine.close)
        self._thread.shutdown(wait=False)
        try:
            await asyncio.wait({closing}, timeout=self._step_limit_s)
        finally:
            if not closing.done():
                abandon("engine")

    def _rejects(self, probe: GenerationRequest) -> bool:
        """Return whether the version served is given up: twice its probe had no finite logprobs.

        The first time is a fault of the engine: EngineFaultError.
        """
        version = self._policy.served
        if version is None or _is_finite(probe):
            return False
        self._metrics.probe_failures.inc()
        if not self._policy.fails_probe():
            raise EngineFaultError(f"the probe of version {version.number} has no finite logprob")
        logger.error("version not sampled from: no finite logprobs", extra={"version": version.number})
        return True

    async def _restart(self, error: EngineFaultError, failed: Callable[[], None]) -> None:
        self._faults += 1
        self._policy.note(Event.LOSE)
        failed()
        # The next engine knows none of them, and the hub may lease them to this sampler again.
        self._changes.clear()
        if self._faults > RESTARTS:
            raise error
        self._metrics.engine_restarts.inc()
        logger.error("engine failed, loading it again", extra={"faults": self._faults}, exc_info=error)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.restart)

    async def _make(self, change: Change, made: "asyncio.Future[PolicyVersion | None]") -> None:
        try:
            version = await self._call(lambda: self._change(change))
        except RefusedError as error:
            self._policy.note(Event.LOSE)
            if not made.done():
                made.set_exception(error)
        except EngineFaultError as error:
            if not made.done():
                made.set_exception(EngineEndedError(str(error)))
            raise
        else:
            if not made.done():
                made.set_result(version)

    def _change(self, change: Change) -> PolicyVersion | None:
        started = time.perf_counter()
        version = change()
        if version is not None:
            self._engine.serve(version.number)
            self._engine.cancel([PROBE_ID])
            self._engine.add(GenerationRequest(PROBE_ID, self._engine.probe, 1, _PROBE_SAMPLING))
            self._metrics.swap_seconds.observe(time.perf_counter() - started)
        return version

    async def _call(self, call: Callable[[], Result]) -> Result:
        """Call the engine in its thread; EngineFaultError if it fails, EngineHungError if it is late."""
        return await self._within_limit(self._start(call))

    def _start(self, call: Callable[[], Result]) -> "asyncio.Future[Result]":
        def guarded() -> Result:
            try:
                return call()
            except (EngineEndedError, *FAULTS) as error:
                raise EngineFaultError(f"the engine failed: {error!r}") from error

        return asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    async def _within_limit(self, awaited: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(self._step_limit_s):
                return await awaited
        except TimeoutError:
            self._is_hung = True
            raise EngineHungError(
                f"a step took longer than engine_step_limit_s = {self._step_limit_s:g}, and an engine "
                "inside this process cannot be ended alone"
            ) from None


def _is_finite(probe: GenerationRequest) -> bool:
    return bool(np.isfinite(probe.completions[0].behaviour_logprob).all())
