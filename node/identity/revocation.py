"""Who is shut out: at the coordinator by its ledger, at a relay by what the coordinator said last.

coordinator: orders to revoke --heartbeats--> relay: <state>/revoked_by_coordinator
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import blake3

from node.identity.files import cannot_read, write_public
from node.identity.peer import is_name
from node.values import limits

logger = logging.getLogger(__name__)

COPY_NAME: Final = "revoked_by_coordinator"
"""At a relay: what the coordinator said last. It counts while the coordinator is away too."""

_DIGEST_BYTES: Final = 16


@dataclass(frozen=True)
class Revocations:
    """Everyone who is shut out."""

    node_ids: tuple[str, ...] = ()
    """Sorted; at most ``limits.REVOCATIONS``."""

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of the list, by which two are compared; as in membership.proto."""
        text = "".join(f"{node_id}\n" for node_id in self.node_ids)
        return blake3.blake3(text.encode()).digest(length=_DIGEST_BYTES)


class RevocationList:
    """Answers who is shut out, by what somebody else keeps."""

    def __init__(self, names: Callable[[], Collection[str]] = tuple) -> None:
        """Ask ``names`` at each question; by default nobody is shut out."""
        self._names = names
        self._current = Revocations()
        self._made_of: frozenset[str] = frozenset()

    def is_revoked(self, node_id: str) -> bool:
        return node_id in self._names()

    def everyone(self) -> frozenset[str]:
        """Return the node ids of all who are shut out now."""
        return frozenset(self._names())

    def current(self) -> Revocations:
        """Return everyone who is shut out now; beyond the limit, the first of them in order."""
        if (names := self.everyone()) != self._made_of:
            if len(names) > limits.REVOCATIONS:
                logger.error("too many revocations for relays", extra={"revoked": len(names)})
            self._current, self._made_of = Revocations(tuple(sorted(names)[: limits.REVOCATIONS])), names
        return self._current


class RevocationCopy:
    """At a relay: the coordinator's list, on disk too."""

    def __init__(self, path: Path) -> None:
        """Read the list. Raises StartupError: it cannot be read."""
        self._path = path
        try:
            words = path.read_text(encoding="utf-8", errors="replace").split()
        except FileNotFoundError:
            words = []
        except OSError as error:
            raise cannot_read(path, error, fix="Check path and owner.") from error
        self.saved = Revocations(tuple(sorted(set(filter(is_name, words)))))
        """As on disk."""
        self.node_ids = frozenset(self.saved.node_ids)
        """All who are shut out."""

    def learn(self, revocations: Revocations) -> None:
        """Shut these nodes out, and no others; where that cannot be saved, it is told again."""
        self.node_ids = frozenset(revocations.node_ids)
        try:
            write_public(self._path, "".join(f"{node_id}\n" for node_id in revocations.node_ids).encode())
            self.saved = revocations
        except OSError as error:
            # The answer to the next heartbeat repeats them, because the digest still differs.
            logger.error("revocations not kept", extra={"path": str(self._path), "detail": str(error)})
