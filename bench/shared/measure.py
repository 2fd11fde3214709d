"""How long something takes, beside something else, and how much memory."""

import ctypes
import gc
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

T = TypeVar("T")

# mallopt(3), with glibc's numbers.
_MMAP_THRESHOLD: Final = -3
_MMAP_MAX: Final = -4
_TRIM_THRESHOLD: Final = -1


def best(run: Callable[[], object], clock: Callable[[], float], repetitions: int) -> float:
    """Return the shortest of several runs, in seconds of ``clock``."""
    took = []
    for _ in range(repetitions):
        started = clock()
        run()
        took.append(clock() - started)
    return min(took)


def in_turns(
    runs: Mapping[str, Callable[[], object]], rounds: int, timed: Callable[[Callable[[], object]], T]
) -> dict[str, list[T]]:
    """Return what ``timed`` says of every run in every round; each round begins with another one."""
    names = list(runs)
    told: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            told[name].append(timed(runs[name]))
    return told


def ratio(ones: Sequence[float], others: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median of the ratios within each round, and their quartiles."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    return round(middle, 4), (round(low, 4), round(high, 4))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of the values do not exceed; 0 where there is none."""
    return float(np.quantile(values, share, method="higher")) if values else 0.0


def over(took: Mapping[str, Sequence[float]], name: str, other: str, key: str) -> dict[str, Any]:
    """Return ``ratio`` of what two runs took as fields of a line; nothing where the other was not run."""
    if other not in took:
        return {}
    middle, quartiles = ratio(took[name], took[other])
    return {key: middle, f"{key}_quartiles": quartiles}


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


def keep_freed_memory() -> None:
    """Never give memory back to the system: what was touched once has no page fault again."""
    _mallopt(_MMAP_MAX, 0)
    _mallopt(_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Return freed memory to the system, from now on each tensor when it is freed."""
    _mallopt(_MMAP_THRESHOLD, 1 << 16)
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _mallopt(parameter: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(parameter, value)
