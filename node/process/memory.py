"""Memory of a process: the C library's allocator and Python's collector of cycles, as a hub needs them.

glibc keeps freed memory that lies below memory in use. In a process with thousands of connections that is a
tenth of all, 15 of 133 kB a peer, so it is given back to the system now and then.
"""

import ctypes
import functools
import gc
import sys
from collections.abc import Callable
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

REUSED_BYTES: Final = 32 << 20
"""Blocks up to this size come from the heap. Every message is smaller; the words of a model are larger."""

KEPT_BYTES: Final = 256 << 20
"""Free memory kept at the end of the heap for the next message."""

GIVE_BACK_EVERY_S: Final = 60.0
"""A pass over 100 MB takes a millisecond of a thread, during which other threads may wait to allocate."""

_GARBAGE: Final = (100_000, 50, 100)
"""Objects more than before, until the newest are looked at for cycles; how many such looks until one at the
middle-aged, and how many of those until one at all."""


def collect_seldom() -> None:
    """Look for garbage in cycles as seldom as a process that serves thousands may.

    Python looks at all objects whenever a quarter are new, which a fleet's heartbeats replace all the time:
    with 10 000 peers it stood still for 1.2 s, six times a minute. Hubs make hardly any cycles: 7 objects
    a peer that joins. What is there now, modules above all, is not looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE)


def keep_freed_memory(*, has_one_heap: bool = False) -> bool:
    """Make the C library reuse freed blocks; return False where it is not glibc or refuses.

    By default it maps, faults in and unmaps the pages of each message of 1 MiB: 1.3-3.6 ms instead of 0.08.

    Args:
        has_one_heap: all threads share a heap, so that what one frees the others reuse. Otherwise each of
            gRPC's threads keeps what it once needed: sixty messages too large to be read left 326 MB, not 81.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    if has_one_heap and not mallopt(_M_ARENA_MAX, 1):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, REUSED_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def give_back() -> None:
    """Return free memory to the system; nothing where the C library is not glibc. Any thread."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
