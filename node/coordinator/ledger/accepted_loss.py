"""An operator's word that steps may be lost: once, and not in the ledger.

A ledger can be put back, or lose its -wal; what it says of itself comes back with it. Was the word in it, the
same loss could be accepted twice, and slots be leased again. So the word lies beside the ledger, names the
generation it is for, and is gone from the disk before the ledger says what was lost.
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
    """Let the word be used no second time; durable on return.

    Raises:
        OSError: the disk fails.
    """
    _file(ledger).unlink(missing_ok=True)
    durable.sync(ledger.parent)


def _file(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.accepts-loss")
