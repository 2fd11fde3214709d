"""Processes that are forked from one that has imported torch and transformers, which takes 5 s of a core.

    test --arguments, environment, descriptors--> server --fork--> python -m <arguments>
      '-------- number of the process, then its exit code ----------'

Everything else is as if the process had been started: session, directory, environment, descriptors, signals.
"""

import asyncio
import contextlib
import fcntl
import functools
import gc
import importlib
import os
import pickle
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pytest

from deploy.runs import processes
from sampler.engines.own_process import process_engine

_MESSAGE_BYTES: Final = 1 << 17
_HIGHEST: Final = 900
"""Descriptors are moved up here before they get their numbers."""

ENGINES: Final[list["WarmProcess"]] = []
"""Every engine's process that was started warm."""


class WarmProcess:
    """As much of ``subprocess.Popen`` as our callers use."""

    def __init__(
        self, arguments: Sequence[str], *, env: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> None:
        """Start ``python -m <arguments>`` in a session of its own.

        Args:
            descriptors: number in the process -> descriptor here.
        """
        self.status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = pickle.dumps((tuple(arguments), dict(env), tuple(descriptors), os.getcwd()))
        with theirs:
            socket.send_fds(_server()[1], [request], [theirs.fileno(), *descriptors.values()])
        self.pid = int(self.status.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        if self.returncode is None:
            self.status.settimeout(timeout)
            try:
                self.returncode = int(self.status.recv(64))
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            self.status.close()
        return self.returncode


class _AsyncProcess:
    """As much of ``asyncio.subprocess.Process``."""

    def __init__(self, process: WarmProcess, stdout: asyncio.StreamReader | None) -> None:
        process.status.setblocking(False)
        self._process = process
        self.pid = process.pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._end = asyncio.create_task(self._wait())

    async def _wait(self) -> int:
        with self._process.status as status:
            self.returncode = int(await asyncio.get_running_loop().sock_recv(status, 64))
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


async def _start(
    *command: str,
    stdin: int,
    stdout: int,
    stderr: int,
    env: Mapping[str, str],
    start_new_session: bool,
) -> object:
    """Stand in for ``asyncio.create_subprocess_exec`` as ``deploy.runs`` calls it."""
    python, _, *arguments = command
    if python != sys.executable:
        return await asyncio.create_subprocess_exec(
            *command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=start_new_session
        )
    reader = None
    with contextlib.ExitStack() as stack:
        if stdout == asyncio.subprocess.PIPE:
            ours, theirs = os.pipe()
            stdout = stack.enter_context(os.fdopen(theirs, "wb"))  # type: ignore[assignment]
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: protocol, os.fdopen(ours, "rb"))
        nowhere = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, nowhere)
        outputs = [each if isinstance(each, int) else each.fileno() for each in (stdout, stderr)]
        descriptors = dict(enumerate([nowhere, *outputs]))
        return _AsyncProcess(WarmProcess(arguments, env=env, descriptors=descriptors), reader)


def _start_engine(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int],
    stdin: int,
    env: Mapping[str, str],
    start_new_session: bool,
) -> WarmProcess:
    """Stand in for ``subprocess.Popen`` as ``process_engine`` calls it."""
    with open(os.devnull) as nowhere:
        descriptors = {0: nowhere.fileno(), 1: 1, 2: 2, **{number: number for number in pass_fds}}
        ENGINES.append(WarmProcess(command[2:], env=env, descriptors=descriptors))
        return ENGINES[-1]


@pytest.fixture
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``deploy.runs`` start warm processes."""
    monkeypatch.setattr(processes, "create_subprocess_exec", _start)


@pytest.fixture(scope="module")
def warm_engines() -> Iterator[None]:
    """Have engines in processes of their own started warm."""
    _server()  # here, so that tests which count processes find it before they begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_engine, "Popen", _start_engine)
        yield


@functools.cache
def _server() -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start the process that forks the others, once for all tests of this one; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
    return process, ours


def _serve(channel: socket.socket) -> tuple[str, ...]:
    """Fork until the other end is closed, which ends this process; return the arguments in each child."""
    gc.collect()
    gc.freeze()
    children: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == channel.fileno():
                    message, received, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 64)
                    if not message:
                        os._exit(0)
                    arguments, environ, numbers, directory = pickle.loads(message)
                    pid = os.fork()
                    if pid == 0:
                        selector.close()  # now: later these numbers are the new process's own
                        channel.close()
                        _become(environ, dict(zip(numbers, received[1:], strict=True)), directory)
                        return tuple(arguments)
                    os.write(received[0], str(pid).encode())
                    for descriptor in received[1:]:
                        os.close(descriptor)
                    ended = os.pidfd_open(pid)
                    children[ended] = (pid, received[0])
                    selector.register(ended, selectors.EVENT_READ)
                else:
                    pid, status = children.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        os.write(status, str(code).encode())
                    os.close(status)


def _become(environ: Mapping[str, str], descriptors: Mapping[int, int], directory: str) -> None:
    """Turn this fork of the server into what a new process would be."""
    os.setsid()
    moved = {to: fcntl.fcntl(source, fcntl.F_DUPFD, _HIGHEST) for to, source in descriptors.items()}
    os.closerange(3, _HIGHEST)
    for to, source in moved.items():
        os.dup2(source, to)
        os.close(source)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [directory, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]


if __name__ == "__main__":
    for warm in ("torch", "transformers", "transformers.models.qwen3.modeling_qwen3"):
        importlib.import_module(warm)
    sys.argv = list(_serve(socket.socket(fileno=int(sys.argv[1]))))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
