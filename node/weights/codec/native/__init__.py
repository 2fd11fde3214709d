"""Loads and calls the C kernel next to this file, if the installation compiled it (deploy/hatch_build.py).

Plain C through ctypes needs no headers of Python, one library serves every Python, and ctypes releases the
interpreter lock, so that threads code frames on all cores.
"""

import ctypes
import functools
import logging
import threading
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.weights.codec.exponent_conditioned.payload_format import (
    INFINITY_BITS,
    BrokenPayloadError,
    Delta,
    PayloadFault,
)
from node.weights.format.digests import Words, words_digest

logger = logging.getLogger(__name__)

LIBRARY_FILE: Final = Path(__file__).with_name("kernel.so")

ABI: Final = 2
"""The number a library of these sources answers with. kernel.c has the same."""

PORTABLE: Final = "portable"
PATHS: Final = (PORTABLE, "AVX2", "AVX-512")
"""In the order of the kernel's numbers; a processor that supports one supports those before it. The portable
path uses vectors of 16 bytes: SSE2, NEON."""


class _Facts(ctypes.Structure):
    """Facts about words that the kernel finds out while coding or making them."""

    _fields_ = (
        ("digest", ctypes.c_uint64),
        ("changes", ctypes.c_uint32),
        ("largest", ctypes.c_uint32),
    )
    digest: int
    """xxh3; 0: the words are too few for the kernel's variant of it."""
    changes: int
    largest: int
    """The largest word, sign aside."""


class _ThreadMemory(threading.local):
    """Memory of one thread, kept from frame to frame.

    Otherwise the few pages that were touched would be freed and faulted in again for each frame. The address
    is kept too: to ask numpy for it each time costs 5 us, since frames flush the caches.
    """

    def __init__(self) -> None:
        nothing = np.empty(0, np.uint8)
        self._known = {"scratch": (nothing, 0), "payload": (nothing, 0)}

    def take(self, name: str, size: int) -> tuple[NDArray[np.uint8], int]:
        """Return bytes, at least ``size``, and their address."""
        if self._known[name][0].size < size:
            array = np.empty(size, np.uint8)
            self._known[name] = array, _at(array)
        return self._known[name]


class Kernel:
    """The library on one of its paths. Any thread may call; each keeps its own memory, 17 bytes a word.

    Every method raises ValueError if the arrays are not of the same size and contiguous.
    """

    def __init__(self, library: ctypes.CDLL, *, path: int) -> None:
        self._library = library
        self._path = path
        self._memory = _ThreadMemory()
        self.name: Final = f"C, {PATHS[path]}"

    def encode(self, words: Words, *, base: Words, limit_bytes: int) -> Delta:
        _check(words, base)
        payload, payload_at = self._memory.take("payload", limit_bytes)
        facts = _Facts()
        size = self._library.heterorl_encode(
            self._path,
            _at(base),
            _at(words),
            words.size,
            self._scratch(words.size),
            payload_at,
            limit_bytes,
            facts,
        )
        return Delta(
            payload[:size].tobytes() if size <= limit_bytes else None,
            changes=facts.changes,
            digest=facts.digest or words_digest(words),
            is_finite=facts.largest < INFINITY_BITS,
        )

    def decode(self, payload: bytes, *, base: Words, out: Words) -> int:
        """Write the words to ``out`` and return their digest.

        Raises BrokenPayloadError: no encoder makes this payload; ``out`` is worthless.
        """
        _check(out, base)
        scratch, facts = self._scratch(out.size), _Facts()
        fault = self._library.heterorl_decode(
            self._path, payload, len(payload), _at(base), _at(out), out.size, scratch, facts
        )
        if fault:
            raise BrokenPayloadError(PayloadFault(fault))
        return facts.digest or words_digest(out)

    def join(self, rest: bytes, exponents: bytes, *, out: Words) -> int:
        """Write the words made of a byte of sign and mantissa and of exponent; return their digest."""
        _check(out, out)
        if not len(rest) == len(exponents) == out.size:
            raise ValueError(f"{len(rest)} bytes and {len(exponents)} exponents for {out.size} words")
        facts = _Facts()
        self._library.heterorl_join(self._path, rest, exponents, _at(out), out.size, facts)
        return facts.digest or words_digest(out)

    def _scratch(self, words: int) -> int:
        return self._memory.take("scratch", self._library.heterorl_room(words))[1]


def load(path: int | None = None) -> Kernel | None:
    """Return the kernel on this machine's best path, or on ``path``; None: there is none."""
    library = _library()
    if library is None:
        return None
    best = library.heterorl_best_path()
    wanted = best if path is None else path
    return Kernel(library, path=wanted) if wanted <= best else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Load the library; warn, once, if there is none, or one that was compiled from other sources."""
    try:
        if not LIBRARY_FILE.exists():
            raise OSError("it was not compiled: no C compiler was found where the node was installed")
        library = ctypes.CDLL(str(LIBRARY_FILE))
        if (found := library.heterorl_abi()) != ABI:
            raise OSError(f"it was compiled from other sources: its ABI number is {found}, not {ABI}")
    except (OSError, AttributeError) as error:
        logger.warning(
            "weights are coded in numpy, 30 to 100 times slower: the C kernel is missing",
            extra={
                "file": str(LIBRARY_FILE),
                "reason": str(error),
                "fix": "install gcc or clang, then the node again (make install, or pip), which compiles it",
            },
        )
        return None
    path, address, data, words = ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32
    size, facts = ctypes.c_size_t, ctypes.POINTER(_Facts)
    for name, result, arguments in (
        ("best_path", path, []),
        ("room", size, [words]),
        ("encode", size, [path, address, address, words, address, address, size, facts]),
        ("decode", ctypes.c_int, [path, data, size, address, address, words, address, facts]),
        ("join", None, [path, data, data, address, words, facts]),
    ):
        function = getattr(library, f"heterorl_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _check(words: NDArray[np.uint16], base: NDArray[np.uint16]) -> None:
    for array in (words, base):
        if array.dtype != np.uint16 or array.shape != (words.size,) or not array.flags.c_contiguous:
            raise ValueError(f"got {array.dtype} {array.shape}, not contiguous uint16 ({words.size},)")


def _at(array: NDArray[np.generic]) -> int:
    return array.ctypes.data
