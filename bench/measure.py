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
    status = Path("/proc/self/status")
    try:
        # 5: start the high-water mark of resident memory anew. See proc(5).
        Path("/proc/self/clear_refs").write_text("5")
        before = _kibibytes(status, "VmRSS")
    except OSError:
        return None, run()
    result = run()
    return 1024 * (_kibibytes(status, "VmHWM") - before), result


def _kibibytes(status: Path, field: str) -> int:
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])
