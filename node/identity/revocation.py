"""Who is shut out: a file of node ids, one a line, that an operator edits while the hub runs."""

import logging
from pathlib import Path
from typing import Final

from node.identity.peer import is_name

logger = logging.getLogger(__name__)

FILE_NAME: Final = "revoked"


class RevocationList:
    """The node ids in a file, read again whenever it changes. No file: nobody is shut out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at: tuple[int, int, int] | None = None
        self._revoked: frozenset[str] = frozenset()

    def is_revoked(self, node_id: str) -> bool:
        """Say whether the file names ``node_id`` now. One ``stat`` where nothing has changed."""
        self._refresh()
        return node_id in self._revoked

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
            state = (status.st_mtime_ns, status.st_size, status.st_ino)
            if state == self._read_at:
                return
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            self._read_at, self._revoked = None, frozenset()
            return
        except OSError as error:
            # Whoever was shut out stays out until the file can be read again.
            logger.error(
                "revocation list unreadable", extra={"path": str(self._path), "detail": error.strerror}
            )
            return
        words = [line.split("#", 1)[0].strip() for line in lines]
        for number, word in enumerate(words, start=1):
            if word and not is_name(word):
                logger.error("revoked name is no node id", extra={"path": str(self._path), "line": number})
        self._read_at, self._revoked = state, frozenset(filter(is_name, words))
        logger.info("revocation list read", extra={"revoked": len(self._revoked)})
