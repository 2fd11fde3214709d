"""How long something takes, and how much memory."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

T = TypeVar("T")


def best(run: Callable[[], object], clock: Callable[[], float], repetitions: int) -> float:
    """Return the shortest of several runs, in seconds of ``clock``."""
    took = []
    for _ in range(repetitions):
        started = clock()
        run()
        took.append(clock() - started)
    return min(took)


def peak(run: Callable[[], T]) -> tuple[int | None, T]:
    """Run, and give how far resident memory rose meanwhile above where it was."""
    gc.collect()
    try:
        restart_peak()
        before = resident_bytes()
    except OSError:
        return None, run()
    result = run()
    return resident_bytes(highest=True) - before, result


def restart_peak() -> None:
    """Start the high-water mark of resident memory anew (Linux only).

    Raises:
        OSError: this system has none.
    """
    Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def resident_bytes(*, highest: bool = False) -> int:
    """Return this process's resident memory, or the highest since ``restart_peak``."""
    field = "VmHWM:" if highest else "VmRSS:"
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
