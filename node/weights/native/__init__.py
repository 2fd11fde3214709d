"""The C kernel next to this file, if the installation could compile it (deploy/hatch_build.py).

Plain C through ctypes: no headers of Python are needed, one library serves every Python, and ctypes
lets go of the interpreter lock meanwhile, so that threads code frames on all cores.
"""

import ctypes
import threading
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

LIBRARY_FILE: Final = Path(__file__).with_name("kernel.so")

PATHS: Final = ("portable", "AVX-512")
"""By the kernel's numbers."""


class FrameFacts(ctypes.Structure):
    """What the kernel learns of the words it codes or makes, on the way."""

    _fields_ = (
        ("digest", ctypes.c_uint64),
        ("changes", ctypes.c_uint32),
        ("largest", ctypes.c_uint32),
    )
    digest: int
    """xxh3; 0 if the words are too few for the kernel's variant of it."""
    changes: int
    largest: int
    """The largest word, signs aside."""


class Kernel:
    """The library on one of its paths. Any thread may call; each keeps memory of its own, 17 bytes a word."""

    def __init__(self, library: ctypes.CDLL, *, path: int) -> None:
        self._library = library
        self._path = path
        self._of_thread = threading.local()

    @property
    def path(self) -> str:
        return PATHS[self._path]

    def encode(
        self, words: NDArray[np.uint16], *, base: NDArray[np.uint16], limit_bytes: int
    ) -> tuple[bytes | None, FrameFacts]:
        """Give the payload: empty if nothing changed, None if it is over the limit.

        Raises:
            ValueError: the arrays are not of the same size and contiguous.
        """
        _check(words, base)
        memory, payload = self._memory(words.size, limit_bytes)
        facts = FrameFacts()
        size = self._library.heterorl_encode(
            self._path, _at(base), _at(words), words.size, _at(memory), _at(payload), limit_bytes, facts
        )
        return (payload[:size].tobytes() if size <= limit_bytes else None), facts

    def decode(
        self, payload: bytes, *, base: NDArray[np.uint16], out: NDArray[np.uint16]
    ) -> tuple[int, FrameFacts]:
        """Give the number of the fault, 0 for none. ``out`` may be ``base``.

        Raises:
            ValueError: the arrays are not of the same size and contiguous.
        """
        _check(out, base)
        memory, _ = self._memory(out.size, 0)
        facts = FrameFacts()
        fault: int = self._library.heterorl_decode(
            self._path, payload, len(payload), _at(base), _at(out), out.size, _at(memory), facts
        )
        return fault, facts

    def join(self, rest: bytes, exponents: bytes, *, out: NDArray[np.uint16]) -> FrameFacts:
        """Make words of their bytes of sign and mantissa, and of their exponents; only the digest is learnt.

        Raises:
            ValueError: there are not as many of each, or ``out`` is not contiguous.
        """
        _check(out, out)
        if not len(rest) == len(exponents) == out.size:
            raise ValueError(f"{len(rest)} bytes and {len(exponents)} exponents for {out.size} words")
        facts = FrameFacts()
        self._library.heterorl_join(self._path, rest, exponents, _at(out), out.size, facts)
        return facts

    def _memory(self, words: int, payload_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        # Kept: the pages that were touched, a small part, would otherwise be given back and taken again
        # for every frame.
        mine = self._of_thread
        if getattr(mine, "words", 0) < words:
            mine.words = words
            mine.memory = np.empty(self._library.heterorl_room(words), np.uint8)
        if getattr(mine, "payload_bytes", -1) < payload_bytes:
            mine.payload_bytes = payload_bytes
            mine.payload = np.empty(payload_bytes, np.uint8)
        return mine.memory, getattr(mine, "payload", mine.memory)


def load(path: int | None = None) -> Kernel | None:
    """Give the kernel on this machine's best path, or on ``path``; None if there is none."""
    try:
        library = ctypes.CDLL(str(LIBRARY_FILE))
    except OSError:
        return None
    address, words, size = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t
    path_number, facts = ctypes.c_int, ctypes.POINTER(FrameFacts)
    library.heterorl_best_path.argtypes = []
    library.heterorl_best_path.restype = path_number
    library.heterorl_room.argtypes = [words]
    library.heterorl_room.restype = size
    encode, decode = library.heterorl_encode, library.heterorl_decode
    encode.argtypes = [path_number, address, address, words, address, address, size, facts]
    encode.restype = size
    decode.argtypes = [path_number, ctypes.c_char_p, size, address, address, words, address, facts]
    decode.restype = ctypes.c_int
    library.heterorl_join.argtypes = [path_number, ctypes.c_char_p, ctypes.c_char_p, address, words, facts]
    library.heterorl_join.restype = None
    best = library.heterorl_best_path()
    wanted = best if path is None else path
    return Kernel(library, path=wanted) if wanted <= best else None


def _check(words: NDArray[np.uint16], base: NDArray[np.uint16]) -> None:
    for array in (words, base):
        if array.dtype != np.uint16 or array.shape != (words.size,) or not array.flags.c_contiguous:
            raise ValueError(f"{array.dtype} {array.shape} in place of contiguous uint16 ({words.size},)")


def _at(array: NDArray[np.generic]) -> int:
    return array.ctypes.data
