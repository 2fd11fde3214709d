"""The beginning of both hosts in a sandbox, and the values that two sandboxes exchange.

First come limits that the kernel enforces, and a sign that they hold.

Values are plain data, or references to everything else. Data is rebuilt as exact builtin types, so that no
method of the sender's runs where it is compared. As JSON: null, true, false and texts as they are, else a tag
and its content: ``{"int": "0x1f"}``, ``{"set": [...]}``, ``{"iterator": 3}``, ``{"object": 4}``.

Importing typing, pathlib, ast or runpy (for ``python -m``) takes as long as starting Python, twice a program.
"""

from __future__ import annotations

import os
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

BEGUN: Final = b"begun\n"
"""Written to standard error once the limits hold. Anything else there was written by bwrap or Python."""

THREADS: Final = 64
"""Processes are not allowed at all. Not enforced for root."""

OPEN_FILES: Final = 64

LINE_BYTES: Final = 4 << 20
"""Longest message between two sandboxes."""

_SEQUENCES: Final[dict[str, type[Any]]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def begin(cpu_s: int, memory_bytes: int) -> None:
    """Limit this process for good. Nothing here can be written to, but what is open already."""
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),  # SIGXCPU, and then SIGKILL for those who ignore it
        (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        (resource.RLIMIT_NPROC, THREADS, THREADS),
        (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))
    os.write(2, BEGUN)


def packed(value: Any, refer: Callable[[Any], dict[str, Any]]) -> Any:
    """Return a value as JSON; ``refer`` returns the tag and number of an object that is not plain.

    Subclasses of plain types are sent as these: a named tuple equals the tuple, a ``Counter`` the dict.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[packed(k, refer), packed(v, refer)] for k, v in value.items()]}
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {tag: [packed(item, refer) for item in value]}
    return refer(value)


def unpacked(
    data: Any, resolve: Callable[[str, Any], Any], read_float: Callable[[str], float] = float.fromhex
) -> Any:
    """Return the value of ``packed``, or raise.

    Args:
        data: What ``packed`` returned.
        resolve: Returns what a tag and a number stand for.
        read_float: Returns the number of a text as of ``float.hex``, or refuses it.
    """
    if data is None or isinstance(data, bool | str):
        return data
    ((tag, content),) = data.items()
    match tag:
        case "int":
            return int(content, 16)
        case "float":
            return read_float(content)
        case "complex":
            return complex(*map(read_float, content))
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {unpacked(k, resolve, read_float): unpacked(v, resolve, read_float) for k, v in content}
        case "object" | "iterator":
            return resolve(tag, content)
        case _:
            return _SEQUENCES[tag](unpacked(item, resolve, read_float) for item in content)
