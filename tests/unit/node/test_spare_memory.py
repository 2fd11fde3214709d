"""Freed memory goes back to the system."""

import ctypes

from bench.shared.measure import resident_bytes
from node.process.memory import give_back


def test_what_was_freed_below_memory_in_use_is_given_back() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    size = 64 << 10  # taken from the heap, not mapped
    blocks = [library.malloc(size) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    *freed, last = blocks
    for block in freed:
        library.free(block)
    held = resident_bytes()
    give_back()
    assert resident_bytes() < held - 32 * (1 << 20)
    library.free(last)
