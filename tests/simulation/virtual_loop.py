"""An event loop whose time is virtual: it jumps to the next timer as soon as nothing is left to run.

Production code runs on it unchanged. What would go to a thread runs on the loop, after as long as the disk of
its process takes; so one order of events follows from one seed. Each task belongs to the process that started
it, and ends with it.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

EPOCH_S = 1_800_000_000.0
"""Unix time at which every run begins."""


class StandsStillError(AssertionError):
    """Nothing is left to run and no timer is set: everybody waits for somebody, for ever."""


class Disk(Protocol):
    def latency_s(self) -> float: ...

    def run(self, work: Callable[[], Any]) -> Any: ...


class VirtualLoop(asyncio.BaseEventLoop):
    """Never sleeps, never reads a socket."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0
        self._selector = self
        self._disks: dict[int, Disk] = {}
        self.crash: BaseException | None = None
        """The first error of a callback or task that nobody awaits."""
        self.set_task_factory(_owned_task)
        self.set_exception_handler(self._note_crash)

    def time(self) -> float:
        return self._virtual_s

    def select(self, timeout: float | None) -> tuple[()]:
        """Let time pass until the next timer, as a selector would wait for it."""
        if timeout is None:
            raise StandsStillError("nobody is left to run, and no timer is set")
        self._virtual_s += timeout
        return ()

    def use_disk(self, executor: object, disk: Disk) -> None:
        """Let what is handed to this executor run on a disk."""
        self._disks[id(executor)] = disk

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = self.create_future()
        disk = self._disks.get(id(executor))

        def work() -> None:
            if future.done():  # the process that asked is gone
                return
            try:
                outcome = func(*args) if disk is None else disk.run(lambda: func(*args))
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(outcome)

        if disk is None:
            self.call_soon(work)
        else:
            self.call_later(disk.latency_s(), work)
        return future

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, events: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _note_crash(self, loop: object, context: dict[str, Any]) -> None:
        # An answer that nobody waits for any more is no fault; a task that ends with an error is.
        error, is_answer = context.get("exception"), context["message"].startswith("Future exception")
        if error is not None and not is_answer and self.crash is None:
            self.crash = error


class Clock:
    """A process's clock: right, but for an offset."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.offset_s = 0.0

    def now(self) -> float:
        return EPOCH_S + self._loop.time() + self.offset_s

    def monotonic(self) -> float:
        return self._loop.time()


class Process:
    """The tasks of one life of one peer. Killed, it says and writes nothing any more."""

    def __init__(self, loop: VirtualLoop, name: str, life: int) -> None:
        self.loop = loop
        self.name = name
        self.life = life
        self.is_alive = True
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task of this process, from wherever."""
        with self.entered():
            return self.loop.create_task(work)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the tasks that the body starts be this process's."""
        token = _owner.set(self)
        try:
            yield
        finally:
            _owner.reset(token)

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        if not self.is_alive:
            task.cancel()

    def kill(self) -> None:
        """End it now; what its tasks still do while they unwind reaches nobody."""
        self.is_alive = False
        for task in list(self._tasks):
            task.cancel()

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)


_owner: contextvars.ContextVar[Process | None] = contextvars.ContextVar("owner", default=None)


def _owned_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: contextvars.Context | None = None
) -> "asyncio.Task[Any]":
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context)
    if (owner := _owner.get()) is not None:
        owner.adopt(task)
    return task
