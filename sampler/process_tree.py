"""Ends a process and everything it started, however that was started.

    stop the group --> stop descendants until no new one appears --> kill all

A process that is stopped forks no more, so the search comes to an end. Engines adopt the orphans among their
descendants (``adopt_orphans``), graders have a parent that does and reaps them (``go_on_in_child``): a daemon
that left its process group and its parent is still found.
"""

import contextlib
import ctypes
import os
import select
import signal
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

ROUNDS: Final = 64
"""Most searches for descendants. Each stops every process that the one before had overlooked; only a bomb
that forks faster than /proc is read gets beyond two or three."""

PROCESSES: Final = 1024
"""Most processes and threads that a grader may start, beyond those its user has. Not enforced for root."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PROC: Final = Path("/proc")


def kill_tree(root: int) -> None:
    """Kill the process ``root``, its process group and its descendants; blocking, some milliseconds."""
    _signal(os.killpg, [root], signal.SIGSTOP)
    _kill_descendants(root)
    _signal(os.killpg, [root], signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, and end when one's own parent ends.

    For a process that others end with ``kill_tree``. Linux only; elsewhere nothing happens.
    """
    _set(_PR_SET_CHILD_SUBREAPER, 1)
    _set(_PR_SET_PDEATHSIG, signal.SIGKILL)


def go_on_in_child() -> None:
    """Return in a child; this process waits for it, kills all that it leaves, and ends as it did.

    Both end when their parents do, and when the connection does that is their standard input.
    """
    adopt_orphans()
    child = os.fork()
    if child == 0:
        _set(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    if stat.S_ISSOCK(os.fstat(0).st_mode):
        threading.Thread(target=_kill_at_hang_up, args=(os.dup(0),), daemon=True).start()
    for descriptor in range(3):
        os.close(descriptor)  # they end with the child
    status = None
    with contextlib.suppress(ChildProcessError):  # nothing is left
        while True:
            ended, how = os.wait()
            if ended == child:
                status = how
            if status is not None:
                _kill_descendants(os.getpid())
    code = os.waitstatus_to_exitcode(status or 0)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _kill_at_hang_up(connection: int) -> None:
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP, once both sides are shut
    poll.poll()
    _kill_descendants(os.getpid())


def processes_of_user() -> int:
    """Count the processes and threads of this process's user."""
    count = 0
    for entry in _processes():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if entry.stat().st_uid == os.getuid():
                count += sum(1 for _ in (entry / "task").iterdir())
    return count


def _set(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _kill_descendants(root: int) -> None:
    stopped: set[int] = set()
    for _ in range(ROUNDS):
        found = _descendants(root) - stopped
        if not found:
            break
        _signal(os.kill, found, signal.SIGSTOP)
        stopped |= found
    _signal(os.kill, stopped, signal.SIGKILL)


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in _processes():
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            # "pid (name) state parent ..."; the name may hold anything.
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        new = [child for child in children.get(waiting.pop(), ()) if child not in found]
        found.update(new)
        waiting += new
    return found


def _processes() -> Iterable[Path]:
    return [entry for entry in _PROC.glob("[0-9]*") if entry.name.isdigit()]


def _signal(send: Callable[[int, int], None], processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended meanwhile
            send(process, number)
