"""``python -m bench.kill_lab.warm_ranks``: a process that has imported torch, and forks ranks of a learner.

    standard input    {"argv": [...], "environ": {...}, "log": PATH}    a rank to start
    standard output   started PID | ended PID CODE

A rank that imports for itself takes eight seconds of a core. Otherwise it is as if torchrun had started it.
"""

import importlib
import json
import os
import runpy
import signal
import sys
from typing import Any, Final

_IMPORTED: Final = (
    "torch",
    "transformers",
    "transformers.models.opt.modeling_opt",
    "learner.ranks.follower",
    "learner.export",
    "node.checks.start_checks",
)
"""Without grpc, which does not survive a fork."""


def _serve() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    assert "grpc" not in sys.modules
    signal.signal(signal.SIGCHLD, _reap)
    for line in sys.stdin:
        told = json.loads(line)
        # Its end is told after its start.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if (pid := os.fork()) == 0:
            _become(told)
        _say(f"started {pid}")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _reap(*_: object) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(f"ended {pid} {os.waitstatus_to_exitcode(status)}")


def _become(told: dict[str, Any]) -> None:
    """Run ``python -m learner.ranks``, in a session of its own; does not return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        log = os.open(told["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(told["environ"])
        sys.argv = ["learner.ranks", *told["argv"]]
        runpy.run_module("learner.ranks", run_name="__main__")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(70)  # a rank that ends as it should does so itself


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    _serve()
