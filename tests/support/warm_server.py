"""The process that all workers of a test run share: it has imported what a role imports, and forks.

    python -m support.warm_server ours|libraries LISTENER PATH

It ends what a worker has left, and itself with the last worker.
"""

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
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from support.warm_python import LIBRARIES, OURS, locked

_MESSAGE_BYTES: Final = 1 << 17
_HIGHEST: Final = 900
"""Descriptors are moved up here before they get their numbers."""

_IMPORTED: Final = {
    LIBRARIES: (
        "google.protobuf.descriptor",
        "grpc.aio",
        "pydantic",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
    ),
    OURS: (
        "bench.forked_context",
        "learner.export",
        "learner.learner_role",
        "learner.model.sliced_loading",
        "matplotlib.pyplot",
        "node.coordinator.coordinator_role",
        "node.process.bootstrap",
        "node.checks.start_checks",
        "node.relay.relay_role",
        "pytest",
        "sampler.engines.torch.torch_engine",
        "sampler.sampler_role",
        "scipy.stats",
        "tensorboard.backend.event_processing.event_accumulator",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.utils.chat_template_utils",
        "wandb.proto.wandb_internal_pb2",
    ),
}
"""All that a role imports, and much of what tests do. None of it starts a thread."""

_PR_SET_PDEATHSIG: Final = 1


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
        arguments, environ, numbers, directory, open_files, blocked = pickle.loads(message)
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            self._selector.close()  # now: later these numbers are the new process's own
            for ours in (self._listener, *self._workers):
                ours.close()
            _become(environ, dict(zip(numbers, received[1:], strict=True)), directory, open_files)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            return tuple(arguments)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
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
        with locked(self._path):  # nobody connects meanwhile
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
    first = [] if environ.get("PYTHONSAFEPATH") else [directory]
    sys.path[:0] = [*first, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]


def _run(arguments: Sequence[str]) -> NoReturn:
    """Run what ``python`` is told to and end as the interpreter does, but free nothing.

    What is freed is written to: the 220 MB that were imported before the fork would be copied, half a second.
    """
    code = 0
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(arguments[1], main.__dict__)
        else:
            sys.argv = list(arguments)
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
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
    _, which, descriptor, place = sys.argv
    for warm in _IMPORTED[which]:
        importlib.import_module(warm)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would be without the other threads"
    _run(_Server(socket.socket(fileno=int(descriptor)), Path(place)).serve())
