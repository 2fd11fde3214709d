"""Processes that are forked from one that has imported torch, transformers and part of us: 6 s of a core.

    test --arguments, environment, descriptors--> server --fork--> python -m <arguments>
      '-------- number of the process, then its exit code ----------'

Everything else is as if the process had been started: session, directory, environment, descriptors, signals.
All workers of a test run share a server. Processes end with the worker that asked for them.
"""

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import os
import pickle
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

from deploy.runs import processes

_MESSAGE_BYTES: Final = 1 << 17
_HIGHEST: Final = 900
"""Descriptors are moved up here before they get their numbers."""

_IMPORTED: Final = (
    "transformers.models.qwen3.modeling_qwen3",
    "learner.export",
    "learner.learner_role",
    "node.coordinator.coordinator_role",
    "node.process.bootstrap",
    "node.process.preflight",
    "node.relay.relay_role",
    "sampler.engines.torch_engine",
    "sampler.sampler_role",
)
"""All that a role imports. None of it starts a thread."""

_PR_SET_PDEATHSIG: Final = 1

ENGINES: Final[list["WarmProcess"]] = []
"""Every engine's process that was started warm."""


class WarmProcess:
    """As much of ``subprocess.Popen`` as our callers use."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        descriptors: Mapping[int, int],
        open_files: int | None = None,
    ) -> None:
        """Start ``python -m <arguments>`` in a session of its own.

        Args:
            descriptors: number in the process -> descriptor here.
            open_files: how many it may allow itself; at first half as many. None: as many as this process.
        """
        self.status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = pickle.dumps((tuple(arguments), dict(env), tuple(descriptors), os.getcwd(), open_files))
        with theirs:
            socket.send_fds(_server(), [request], [theirs.fileno(), *descriptors.values()])
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


class AsyncProcess:
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

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def start(*command: str, **options: Any) -> Any:
    """Stand in for ``asyncio.create_subprocess_exec`` as ``deploy.runs`` calls it."""
    python, _, *arguments = command
    if python != sys.executable:
        return await asyncio.create_subprocess_exec(*command, **options)
    return await start_warm(arguments, options["stdout"], options["stderr"], env=options["env"])


async def start_warm(
    arguments: Sequence[str],
    stdout: Any,
    stderr: Any,
    *,
    env: Mapping[str, str],
    open_files: int | None = None,
) -> AsyncProcess:
    """Start ``python -m <arguments>``; the streams as for ``asyncio.create_subprocess_exec``."""
    reader = None
    with contextlib.ExitStack() as stack:
        if stdout == asyncio.subprocess.PIPE:
            ours, theirs = os.pipe()
            stdout = stack.enter_context(os.fdopen(theirs, "wb"))
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: protocol, os.fdopen(ours, "rb"))
        nowhere = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, nowhere)
        outputs = [each if isinstance(each, int) else each.fileno() for each in (stdout, stderr)]
        descriptors = dict(enumerate([nowhere, *outputs]))
        process = WarmProcess(arguments, env=env, descriptors=descriptors, open_files=open_files)
        return AsyncProcess(process, reader)


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
    """Make ``deploy.runs`` start warm processes."""
    monkeypatch.setattr(processes, "create_subprocess_exec", start)


@pytest.fixture(scope="module")
def warm_engines() -> Iterator[None]:
    """Start engines in processes of their own warm."""
    _server()  # here, so that tests which count processes find it before they begin
    with pytest.MonkeyPatch.context() as patch:
        # By its name: who only starts processes needs no torch.
        patch.setattr("sampler.engines.own_process.process_engine.Popen", _start_engine)
        yield


_started: Final[list["subprocess.Popen[bytes]"]] = []
"""Kept, as it ends after this process."""


@functools.cache
def _server() -> socket.socket:
    """Connect to the process that forks the others; start it if this is the first worker that needs it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    path = Path(tempfile.gettempdir()) / f"warm-{run}"
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _locked(path):
        try:
            ours.connect(str(path))
        except FileNotFoundError:
            _start_server(path)
            ours.connect(str(path))
    return ours


def _start_server(path: Path) -> None:
    environ = {
        **os.environ,
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # as in every daemon; grpc reads it when it is imported
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, "-m", __name__, str(listener.fileno()), str(path)]
        _started.append(
            subprocess.Popen(command, pass_fds=[listener.fileno()], env=environ, start_new_session=True)
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Server:
    """Forks what workers ask for; ends what a worker has left, and itself with the last worker."""

    def __init__(self, listener: socket.socket, path: Path) -> None:
        self._listener = listener
        self._path = path
        self._workers: dict[socket.socket, set[int]] = {}
        """Connection of each worker -> its processes that run."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> tuple[str, ...]:
        """Return the arguments of a process, in that process."""
        gc.collect()
        gc.freeze()
        while True:
            for key, _ in self._selector.select():
                arguments: tuple[str, ...] | None = key.data()
                if arguments is not None:
                    return arguments

    def _accept(self) -> None:
        worker, _ = self._listener.accept()
        self._workers[worker] = set()
        self._selector.register(worker, selectors.EVENT_READ, functools.partial(self._answer, worker))

    def _answer(self, worker: socket.socket) -> tuple[str, ...] | None:
        message, received, _, _ = socket.recv_fds(worker, _MESSAGE_BYTES, 64)
        if not message:
            self._forget(worker)
            return None
        arguments, environ, numbers, directory, open_files = pickle.loads(message)
        pid = os.fork()
        if pid == 0:
            self._selector.close()  # now: later these numbers are the new process's own
            for ours in (self._listener, *self._workers):
                ours.close()
            _become(environ, dict(zip(numbers, received[1:], strict=True)), directory, open_files)
            return tuple(arguments)
        os.write(received[0], str(pid).encode())
        for descriptor in received[1:]:
            os.close(descriptor)
        self._workers[worker].add(pid)
        ended = os.pidfd_open(pid)
        self._selector.register(
            ended, selectors.EVENT_READ, functools.partial(self._reap, ended, worker, pid, received[0])
        )
        return None

    def _reap(self, ended: int, worker: socket.socket, pid: int, status: int) -> None:
        self._selector.unregister(ended)
        os.close(ended)
        self._workers.get(worker, set()).discard(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            os.write(status, str(code).encode())
        os.close(status)

    def _forget(self, worker: socket.socket) -> None:
        self._selector.unregister(worker)
        for left in self._workers.pop(worker):
            os.kill(left, signal.SIGKILL)
        worker.close()
        if self._workers:
            return
        with _locked(self._path):  # nobody connects meanwhile
            self._listener.setblocking(False)
            try:
                self._accept()
            except BlockingIOError:
                self._path.unlink()
                self._path.with_suffix(".lock").unlink()
                os._exit(0)
            self._listener.setblocking(True)


def _become(
    environ: Mapping[str, str], descriptors: Mapping[int, int], directory: str, open_files: int | None
) -> None:
    """Turn this fork of the server into what a new process would be, except that it ends with the server."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    moved = {to: fcntl.fcntl(source, fcntl.F_DUPFD, _HIGHEST) for to, source in descriptors.items()}
    os.closerange(3, _HIGHEST)
    for to, source in moved.items():
        os.dup2(source, to)
        os.close(source)
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files // 2, open_files))
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [directory, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]


def _run(module: str) -> NoReturn:
    """Run a module and end as the interpreter does, but free nothing.

    What is freed is written to: the 220 MB that were imported before the fork would be copied, half a second.
    """
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except Exception:
        code = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for warm in _IMPORTED:
        importlib.import_module(warm)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would be without the other threads"
    sys.argv = list(_Server(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])).serve())
    _run(sys.argv[0])
