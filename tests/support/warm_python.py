"""``python`` forked from a process that has imported torch, transformers and part of us: 6 s of a core.

    test --arguments, environment, descriptors--> server --fork--> python <arguments>
      '-------- number of the process, then its exit code ----------'

Everything else is as if the process had been started: session, directory, environment, descriptors, signals.
All workers of a test run share a server. Processes end with the worker that asked for them.

Run as a program it is an interpreter for who starts one by its path: pytest-xdist, multiprocessing. Nothing
but the standard library is imported, as in any interpreter.
"""

import contextlib
import fcntl
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

RUN: Final = "PYTEST_XDIST_TESTRUNUID"
"""Names the run of tests in the environment of all its processes."""

OURS: Final = "ours"
LIBRARIES: Final = "libraries"
"""Servers by what they have imported: this software too, or only what every release of it needs."""


class WarmProcess:
    """As much of ``subprocess.Popen`` as our callers use."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        descriptors: Mapping[int, int],
        open_files: int | None = None,
        warm: str = OURS,
    ) -> None:
        """Start ``python <arguments>``, which are ``-c`` and a program or a module's and its own.

        It has a session of its own.

        Args:
            descriptors: number in the process -> descriptor here.
            open_files: how many it may allow itself; at first half as many. None: as many as this process.
            warm: the server that it is forked from.
        """
        self.status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        request = pickle.dumps(
            (tuple(arguments), dict(env), tuple(descriptors), os.getcwd(), open_files, blocked)
        )
        with theirs:
            socket.send_fds(server(warm), [request], [theirs.fileno(), *descriptors.values()])
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
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            self.status.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its code is on the way
                os.kill(self.pid, signal.SIGKILL)


_started: Final[list["subprocess.Popen[bytes]"]] = []
"""Kept, as it ends after this process."""


@functools.cache
def server(warm: str) -> socket.socket:
    """Connect to the process that forks the others; start it if this is the first worker that needs it."""
    path = Path(tempfile.gettempdir()) / f"warm-{warm}-{os.environ[RUN]}"
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with locked(path):
        try:
            ours.connect(str(path))
        except FileNotFoundError:
            _start_server(path, warm)
            ours.connect(str(path))
    return ours


def _start_server(path: Path, warm: str) -> None:
    places = sys.path if warm == OURS else [str(Path(__file__).parents[1])]
    environ = {
        **os.environ,
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # as in every daemon; grpc reads it when it is imported
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        arguments = (warm, str(listener.fileno()), str(path))
        command = [sys.executable, "-P", "-m", "support.warm_server", *arguments]
        _started.append(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # a worker's own is how it talks to pytest
                pass_fds=[listener.fileno()],
                env=environ,
                start_new_session=True,
            )
        )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked ends it
    descriptors = {number: number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)}
    arguments = sys.argv[sys.argv.index("-c") :]
    return WarmProcess(arguments, env=os.environ, descriptors=descriptors).wait()


def _is_open(number: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{number}")


if __name__ == "__main__":
    sys.exit(_main() & 0xFF)
