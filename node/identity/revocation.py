"""Who is shut out: a file of node ids, one a line, that ``heterorl-node revoke`` edits while the hub runs.

coordinator: <state>/revoked --heartbeats--> relay: <state>/revoked_by_coordinator, <state>/revoked
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import blake3

from node import limits
from node.identity.files import write_public
from node.identity.peer import is_name

logger = logging.getLogger(__name__)

FILE_NAME: Final = "revoked"
COPY_NAME: Final = "revoked_by_coordinator"
"""At a relay: what the coordinator said last. It counts while the coordinator is away too."""

_DIGEST_BYTES: Final = 16


def remarks(text: str) -> dict[str, str]:
    """Return the node ids in a file's text, each with the text after its ``#``."""
    found = {}
    for line in text.splitlines():
        node_id, _, remark = map(str.strip, line.partition("#"))
        if is_name(node_id):
            found[node_id] = remark
    return found


def with_nodes(text: str, node_ids: Iterable[str], *, remark: str) -> str:
    """Return a file's text with more nodes; those that are in it already stay as they are."""
    listed = remarks(text)
    new = [node_id for node_id in dict.fromkeys(node_ids) if node_id not in listed]
    end = "" if not text or text.endswith("\n") else "\n"
    return text + end + "".join(f"{node_id}  # {remark}\n" for node_id in new)


def without_nodes(text: str, node_ids: Iterable[str]) -> str:
    """Return a file's text without the lines of some nodes."""
    left = set(node_ids)
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line.split("#", 1)[0].strip() not in left)


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

    def save(self, path: Path) -> None:
        """Write a file that ``RevocationList`` reads. Raises OSError: it is as it was."""
        write_public(path, "".join(f"{node_id}\n" for node_id in self.node_ids).encode())


class RevocationList:
    """The node ids in some files, each read again whenever it changes. No file: nobody is shut out."""

    def __init__(self, *paths: Path) -> None:
        self._files = [NodeFile(path) for path in paths]

    def is_revoked(self, node_id: str) -> bool:
        """Return whether a file names ``node_id`` now. One ``stat`` a file where nothing has changed."""
        return any(node_id in file.remarks() for file in self._files)

    def everyone(self) -> frozenset[str]:
        """Return the node ids of all who are shut out now."""
        return frozenset[str]().union(*(file.remarks() for file in self._files))

    def current(self) -> Revocations:
        """Return everyone who is shut out now; beyond the limit, the first of them in order."""
        node_ids = sorted(self.everyone())
        if len(node_ids) > limits.REVOCATIONS:
            logger.error("too many revocations for relays", extra={"revoked": len(node_ids)})
        return Revocations(tuple(node_ids[: limits.REVOCATIONS]))


class NodeFile:
    """Node ids in a file, each with a remark; read again whenever it changes. No file: no node."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at: tuple[int, int, int] | None = None
        self._remarks: Mapping[str, str] = {}

    def remarks(self) -> Mapping[str, str]:
        """Return the nodes that the file names now, with their remarks; one ``stat`` if it is unchanged."""
        try:
            status = self._path.stat()
            state = (status.st_mtime_ns, status.st_size, status.st_ino)
            if state != self._read_at:
                self._remarks = self._read(self._path.read_text(encoding="utf-8", errors="replace"))
                self._read_at = state
        except FileNotFoundError:
            self._read_at, self._remarks = None, {}
        except OSError as error:
            # Nodes that it named stay named until it can be read again.
            logger.error(
                "list of nodes unreadable", extra={"path": str(self._path), "detail": error.strerror}
            )
        return self._remarks

    def _read(self, text: str) -> Mapping[str, str]:
        for number, line in enumerate(text.splitlines(), start=1):
            word = line.split("#", 1)[0].strip()
            if word and not is_name(word):
                logger.error("name is not a valid node id", extra={"path": str(self._path), "line": number})
        found = remarks(text)
        logger.info("list of nodes read", extra={"path": str(self._path), "nodes": len(found)})
        return found
