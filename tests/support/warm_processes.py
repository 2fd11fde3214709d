"""A plugin of pytest: workers of pytest-xdist are forked warm, and processes that tests start may be, too."""

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest

from deploy.runs import processes
from sampler.engines.text import template_process
from support import warm_python
from support.warm_python import LIBRARIES, OURS, RUN, WarmProcess, server

ENGINES: Final[list[WarmProcess]] = []
"""Every engine's process that was started warm."""

RELEASES: Final[dict[str, Sequence[Path]]] = {}
"""Interpreters of other releases -> what they import from first, with nothing of this one."""

_INTERPRETER: Final = [sys.executable, warm_python.__file__]

_fork_servers: Final[list["subprocess.Popen[bytes]"]] = []


def pytest_configure(config: pytest.Config) -> None:
    """Fork workers warm, and multiprocessing's server in each of them."""
    os.environ.setdefault(RUN, uuid4().hex)  # processes that tests start find the same server
    if hasattr(config, "workerinput"):
        util.spawnv_passfds = _spawn
        template_process.Popen = WarmTemplates  # type: ignore[assignment, attr-defined]
    elif asked := getattr(config.option, "tx", None):
        config.option.testrunuid = os.environ[RUN]
        server(OURS)  # it has all that pytest put on the path, and ends with this process
        warm = f"popen//python={shlex.join(_INTERPRETER)}"
        config.option.tx = [warm if each == "popen" else each for each in asked]


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Stand in for ``multiprocessing.util.spawnv_passfds``."""
    if "multiprocessing.forkserver" not in args[-1]:
        return _spawn_cold(path, args, passfds)
    _fork_servers.append(subprocess.Popen([*_INTERPRETER, *args[1:]], pass_fds=passfds))
    return _fork_servers[-1].pid


_spawn_cold: Final = util.spawnv_passfds


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
    streams, env = (options["stdout"], options["stderr"]), options["env"]
    if python in RELEASES:
        env = {**env, "PYTHONPATH": os.pathsep.join(map(str, RELEASES[python])), "PYTHONSAFEPATH": "1"}
        return await start_warm(arguments, *streams, env=env, warm=LIBRARIES)
    if python != sys.executable:
        return await asyncio.create_subprocess_exec(*command, **options)
    return await start_warm(arguments, *streams, env=env)


async def start_warm(
    arguments: Sequence[str],
    stdout: Any,
    stderr: Any,
    *,
    env: Mapping[str, str],
    open_files: int | None = None,
    warm: str = OURS,
) -> AsyncProcess:
    """Start ``python -m <arguments>`` or ``-c`` and a program; streams as for ``create_subprocess_exec``."""
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
        stderr = stdout if stderr == asyncio.subprocess.STDOUT else stderr
        outputs = [each if isinstance(each, int) else each.fileno() for each in (stdout, stderr)]
        descriptors = dict(enumerate([nowhere, *outputs]))
        process = WarmProcess(arguments, env=env, descriptors=descriptors, open_files=open_files, warm=warm)
        return AsyncProcess(process, reader)


def _start_engine(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int],
    stdin: int,
    stdout: int,
    stderr: int,
    env: Mapping[str, str],
    start_new_session: bool,
) -> WarmProcess:
    """Stand in for ``subprocess.Popen`` as ``process_engine`` calls it."""
    with open(os.devnull) as nowhere:
        descriptors = {0: nowhere.fileno(), 1: stdout, 2: stderr, **{number: number for number in pass_fds}}
        ENGINES.append(WarmProcess(command[2:], env=env, descriptors=descriptors))
        return ENGINES[-1]


class WarmTemplates(WarmProcess):
    """As much of ``Popen`` as renders chat templates: imports take a second of a core."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        requests, answers = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(requests[1], "wb"), os.fdopen(answers[0], "rb")
        with os.fdopen(requests[0]), os.fdopen(answers[1]), open(os.devnull, "w") as nowhere:
            descriptors = {0: requests[0], 1: answers[1], 2: nowhere.fileno()}
            super().__init__(command[2:], env=env, descriptors=descriptors)


@pytest.fixture(scope="session")
def warm_server() -> None:
    """Start the server in this process, which outlives those that a test starts."""
    server(OURS)


@pytest.fixture
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``deploy.runs`` start warm processes."""
    monkeypatch.setattr(processes, "create_subprocess_exec", start)


@pytest.fixture(scope="module")
def warm_engines(warm_server: None) -> Iterator[None]:
    """Start engines in processes of their own warm; tests that count processes find the server running."""
    with pytest.MonkeyPatch.context() as patch:
        # By its name: who only starts processes needs no torch.
        patch.setattr("sampler.engines.own_process.process_engine.Popen", _start_engine)
        yield
