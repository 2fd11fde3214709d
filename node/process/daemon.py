"""The life of a process: stages start in order, all serve, stages drain in reverse order.

    STARTING [--STANDBY] --every service ready--> SERVING --stop--> DRAINING --all returned--> exit

A stage is one role (or the telemetry). Its services start one after the other, each ready before the next.
A stage is built only when the one before it is ready, so that a learner may enrol with the coordinator of
its own process. The daemon stops on SIGTERM or SIGINT, on SIGHUP unless that was ignored at the start
(nohup), and when a service returns or fails. It drains from the last stage to the first, so that no service
loses one it depends on; the services of a stage stop together. A service still running after
``drain_timeout_s``, or at a second SIGTERM or SIGINT, is named in the log and cancelled. The process ends
without a service that does not heed that within CANCELLED_S.
"""

import asyncio
import contextlib
import contextvars
import enum
import logging
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from node.errors import ConfigError, DeposedError, RefusedError, StartupError
from node.exit_code import ExitCode, exit_code_of_failure
from node.process.abandoned_threads import abandon, exit_without_them
from node.process.service import Service

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP comes from a terminal that closes and drains; the configuration is never read again."""

CANCELLED_S: Final = 15.0
"""How long cancelled services may take to put away what they hold. After the default ``drain_timeout_s`` it
is over before systemd (TimeoutStopSec) and Kubernetes kill."""


class Phase(enum.StrEnum):
    """Phases of a daemon's life."""

    STARTING = "starting"
    STANDBY = "standby"
    """A coordinator waits until it leads; it has started, and serves nothing."""
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class StartStage:
    """Services that start and stop together, built once the stages before are ready."""

    name: str
    build: Callable[[], Coroutine[Any, Any, Sequence[Service]]]
    """Runs in the stage's own context: what it binds to log records also applies to the services."""


async def run_daemon(
    stages: Sequence[StartStage], *, drain_timeout_s: float, announce: Callable[[Phase], None]
) -> ExitCode:
    """Run stages until something stops them; return the exit code.

    ``drain_timeout_s`` is for all stages together; ``announce`` hears of each phase and must not raise.

    Returns:
        DRAINED: every service returned in time, whatever the cause of the stop.
        COULD_NOT_START (or CONFIGURATION, for a ConfigError): a service failed before all were ready.
        FAILED: a service failed later, or was late to drain.
        DEPOSED: the coordinator leads the run no longer.
    """
    daemon = _Daemon(announce)
    async with asyncio.TaskGroup() as tasks:
        with _signals(daemon.on_signal):
            starting = tasks.create_task(daemon.start(stages, tasks), name="start")
            await daemon.wait_for_stop()
            starting.cancel()
            await asyncio.wait([starting])
            announce(Phase.DRAINING)
            daemon.draining = tasks.create_task(daemon.drain(), name="drain")
            await asyncio.wait([daemon.draining], timeout=drain_timeout_s)
            daemon.draining.cancel()
            late = daemon.cancel_late()
        # From here on a signal kills.
        if late:
            _, deaf = await asyncio.wait(late, timeout=CANCELLED_S)
            for task in deaf:
                abandon(task.get_name())
            if deaf:
                exit_without_them(daemon.exit_code)
    return daemon.exit_code


@dataclass(slots=True)
class _RunningStage:
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    services: list[asyncio.Task[None]] = field(default_factory=list)


class _Daemon:
    def __init__(self, announce: Callable[[Phase], None]) -> None:
        self._announce = announce
        self._is_serving = False
        self._has_signal = False
        self._stop = asyncio.Event()
        self._stages: list[_RunningStage] = []
        self.exit_code = ExitCode.DRAINED
        self.draining: asyncio.Task[None] | None = None

    async def wait_for_stop(self) -> None:
        await self._stop.wait()

    def on_signal(self, number: signal.Signals) -> None:
        logger.info("signal received", extra={"signal": number.name})
        self._stop.set()
        if number == signal.SIGHUP:
            return  # a closing terminal sends it twice, by the kernel and by the shell: no sign of impatience
        if self._has_signal and self.draining is not None:
            self.draining.cancel()
        self._has_signal = True

    async def start(self, stages: Sequence[StartStage], tasks: asyncio.TaskGroup) -> None:
        for stage in stages:
            context = contextvars.copy_context()
            try:
                services = await asyncio.create_task(stage.build(), context=context)
            except Exception as error:  # of any kind: what has started is drained
                self._fail(stage.name, error)
                return
            running = _RunningStage()
            self._stages.append(running)
            for service in services:
                is_ready = asyncio.Event()
                supervised = self._supervise(service, is_ready, running.stopping)
                running.services.append(tasks.create_task(supervised, name=service.name, context=context))
                await is_ready.wait()  # cancelled where the service never becomes ready
                logger.debug("service ready", extra={"service": service.name})
        self._is_serving = True
        self._announce(Phase.SERVING)
        logger.info("ready", extra={"stages": [stage.name for stage in stages]})

    async def _supervise(self, service: Service, is_ready: asyncio.Event, stopping: asyncio.Event) -> None:
        try:
            await service.run(ready=is_ready.set, stopping=stopping)
        except Exception as error:  # the others are drained, not torn down with it
            self._fail(service.name, error)
            return
        if not stopping.is_set():
            logger.info("service finished", extra={"service": service.name})
            self._stop.set()

    def _fail(self, name: str, error: Exception) -> None:
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]  # from the service's own task group
        if self.exit_code is ExitCode.DRAINED:  # the first failure is the one that counts
            self.exit_code = exit_code_of_failure(error, was_serving=self._is_serving)
        # These say what to do; a trace would not help.
        explains_itself = isinstance(error, ConfigError | DeposedError | StartupError | RefusedError)
        logger.error(
            "service failed",
            extra={"service": name, "error": str(error)},
            exc_info=None if explains_itself else error,
        )
        self._stop.set()

    async def drain(self) -> None:
        for stage in reversed(self._stages):
            stage.stopping.set()
            if stage.services:
                await asyncio.wait(stage.services)

    def cancel_late(self) -> list[asyncio.Task[None]]:
        late = [task for stage in self._stages for task in stage.services if not task.done()]
        if not late:
            return late
        logger.error("late to drain", extra={"services": sorted(task.get_name() for task in late)})
        if self.exit_code is ExitCode.DRAINED:
            self.exit_code = ExitCode.FAILED
        for task in late:
            task.cancel()
        return late


@contextlib.contextmanager
def _signals(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    # SIGHUP is ignored under nohup: the process is to outlive the terminal.
    heard = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    for number in heard:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
