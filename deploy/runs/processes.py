"""The child processes of a run: each in its own session, logged to a file, watched, and never left behind."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio import create_subprocess_exec
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

STOP_TIMEOUT_S: Final = 30.0
"""For a drain, which takes a second or two with a tiny model."""

ABANDON_TIMEOUT_S: Final = 5.0
"""For a drain after the run was aborted."""

_ASKS_TO_END: Final = (signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C cancels the main task by itself."""

_TAIL_BYTES: Final = 4000

T = TypeVar("T")


ONE_THREAD_EACH: Final = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
"""Environment of processes that share a machine's cores."""


class ChildError(Exception):
    """A child ended unexpectedly; the message has the end of its log."""


@dataclass(slots=True, eq=False)
class _Child:
    process: asyncio.subprocess.Process
    may_end: bool
    """Whether it may end by itself, with exit code 0."""
    is_stopping: bool = False


class Children:
    """The children by name. Leaving the context ends those still running.

    A signal that asks this process to end cancels the task that entered, so that no child outlives it.
    """

    def __init__(
        self,
        *,
        log_of: Callable[[str], Path],
        environ: Mapping[str, str],
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self._log_of = log_of
        self._environ = environ
        self._stop_timeout_s = stop_timeout_s
        self._children: dict[str, _Child] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[ChildError] = asyncio.get_running_loop().create_future()
        self.starts: dict[str, int] = {}
        """How often each child was started."""

    async def __aenter__(self) -> Self:
        this = asyncio.current_task()
        assert this is not None
        for number in _ASKS_TO_END:
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for child in self._children.values():
                _signal(child, signal.SIGTERM)
            if self._watches:
                await asyncio.wait(self._watches, timeout=ABANDON_TIMEOUT_S)
        finally:
            for child in self._children.values():
                _signal(child, signal.SIGKILL)
            for number in _ASKS_TO_END:
                asyncio.get_running_loop().remove_signal_handler(number)

    async def run(self, name: str, *arguments: str, python: str | None = None) -> str:
        """Run ``python -m <arguments>`` to its end; return its standard output.

        Raises:
            ChildError: its exit code is not 0.
        """
        child = await self._spawn(
            name, arguments, environ={}, may_end=True, stdout=asyncio.subprocess.PIPE, python=python
        )
        assert child.process.stdout is not None
        printed = await child.process.stdout.read()
        if exit_code := await child.process.wait():
            raise self.failure(name, f"ended with exit code {exit_code}")
        return printed.decode()

    async def start(
        self,
        name: str,
        *arguments: str,
        environ: Mapping[str, str],
        may_end: bool = False,
        python: str | None = None,
    ) -> None:
        """Start ``python -m <arguments>``, this interpreter unless another is named.

        An earlier child of this name has ended.
        """
        await self._spawn(name, arguments, environ=environ, may_end=may_end, stdout=None, python=python)

    def pid(self, name: str) -> int:
        """Return the process id of a child's newest incarnation."""
        return self._children[name].process.pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a child, which may end by itself from now on."""
        _signal(self._children[name], number)

    async def wait_for_end(self, name: str, *, timeout_s: float) -> int | None:
        """Return a child's exit code once it has ended; None if it has not in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._children[name].process.wait()
        return None

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, unless a child ends unexpectedly meanwhile.

        Raises:
            ChildError: for the first such child; ``work`` is cancelled.
        """
        task = asyncio.create_task(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():  # also if the work has noticed and raised an error of its own
                raise self._failure.result()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def failure(self, name: str, what: str) -> ChildError:
        """Return the error of a child, with the end of its log; ``guard`` raises it."""
        with self._log_of(name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        error = ChildError(f"{name} {what}; its log ends:\n{tail}")
        if not self._failure.done():
            self._failure.set_result(error)
        return error

    async def stop(self, name: str) -> int:
        """Drain a child and return its exit code. A late one is killed, which its exit code shows."""
        child = self._children[name]
        _signal(child, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                return await child.process.wait()
        except TimeoutError:
            return await self.kill(name)

    async def kill(self, name: str) -> int:
        """Kill a child (SIGKILL); return its exit code."""
        child = self._children[name]
        _signal(child, signal.SIGKILL)
        return await child.process.wait()

    async def _spawn(
        self,
        name: str,
        arguments: tuple[str, ...],
        *,
        environ: Mapping[str, str],
        may_end: bool,
        stdout: int | None,
        python: str | None = None,
    ) -> _Child:
        with self._log_of(name).open("ab") as log:
            process = await create_subprocess_exec(
                *(python or sys.executable, "-m", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log,
                env={**self._environ, **environ},
                start_new_session=True,  # this process handles Ctrl-C
            )
        child = self._children[name] = _Child(process, may_end)
        self.starts[name] = self.starts.get(name, 0) + 1
        watch = asyncio.create_task(self._watch(name, child), name=f"watch {name}")
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return child

    async def _watch(self, name: str, child: _Child) -> None:
        exit_code = await child.process.wait()
        if not child.is_stopping and not (child.may_end and exit_code == 0):
            self.failure(name, f"ended with exit code {exit_code}")


def children_below(root: Path) -> Children:
    """Return children that have a thread each, log below ``root`` and import from this repository."""
    repository = Path(__file__).parents[2]
    imports = os.pathsep.join(map(str, (repository, repository / "proto")))
    environ = os.environ | ONE_THREAD_EACH | {"PYTHONPATH": imports}
    return Children(log_of=lambda name: root / "logs" / f"{name}.log", environ=environ)


def _signal(child: _Child, number: signal.Signals) -> None:
    child.is_stopping = True
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)
