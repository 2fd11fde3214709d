"""The mark that an operator accepts the loss of steps; it counts once.

A ledger can be restored, or lose its -wal, and then what it says of itself is old. With the mark in the
ledger the same loss could be accepted twice, and slots be leased again. So the mark is a file beside the
ledger. It names the generation it is for, and is gone from the disk before the ledger records what was lost.
"""

import contextlib
from pathlib import Path

from node import durable
from node.identity.files import write_secret


def give(ledger: Path, *, first_slot: int) -> None:
    """Accept whatever was lost before the generation that begins with a slot; durable on return."""
    write_secret(_file(ledger), f"{first_slot}\n".encode())


def is_given(ledger: Path, *, first_slot: int) -> bool:
    """Whether the loss before this generation was accepted, and has not been claimed since."""
    with contextlib.suppress(OSError):
        return _file(ledger).read_bytes() == f"{first_slot}\n".encode()
    return False


def spend(ledger: Path) -> None:
    """Remove the mark, so that it counts once; durable on return.

    Raises:
        OSError: the disk fails.
    """
    _file(ledger).unlink(missing_ok=True)
    durable.sync(ledger.parent)


def _file(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.accepts-loss")
