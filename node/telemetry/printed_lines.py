r"""Makes events of the log of what a program prints: a field each, filtered, bounded, only so many a minute.

A grader, an engine, a library or a user's own class writes what it likes to standard output and standard
error: bytes that a terminal obeys (``\x1b[2J``), or a line feed and a JSON object that would pass for an
event of ours. Here each line becomes ``printed`` with the name of the program and the visible text.
"""

import contextlib
import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TextIO

from node.text.visible_text import visible

logger = logging.getLogger(__name__)

LINE_CHARACTERS: Final = 1000
"""Longest text of an event; the end of a line that is longer is left out, and the event says so."""

LINES_PER_INTERVAL: Final = 200
"""Most of one program. A traceback has 20 to 60; a line for each completion is too much."""

INTERVAL_S: Final = 60.0

_MOST_HELD_BYTES: Final = 4 * LINE_CHARACTERS
"""Kept of a line that has not ended: enough for LINE_CHARACTERS of UTF-8."""


class PrintedLines:
    """Makes events of what one program prints. Any thread; two may not feed at once."""

    def __init__(self, program: str, *, now: Callable[[], float] = time.monotonic) -> None:
        """Take what ``program`` prints, named so in the log."""
        self._program = program
        self._now = now
        self._held = b""
        self._cut_bytes = 0
        """Bytes left out of the line that is held."""
        self._began_at = now()
        self._lines = 0

    def feed(self, chunk: bytes) -> None:
        """Take what was printed next; whole lines are logged, a progress bar's \\r ends one, too."""
        *whole, begun = chunk.replace(b"\r", b"\n").split(b"\n")
        for end in whole:
            self._hold(end)
            self._log()
        self._hold(begun)

    def end(self) -> None:
        """Log what is left without a line feed, and how many lines were not logged."""
        self._log()
        self._count_unlogged()

    def _hold(self, piece: bytes) -> None:
        room = _MOST_HELD_BYTES - len(self._held)
        self._held += piece[:room]
        self._cut_bytes += max(0, len(piece) - room)

    def _log(self) -> None:
        held, cut_bytes = self._held, self._cut_bytes
        self._held, self._cut_bytes = b"", 0
        if not held.strip():
            return
        if self._now() - self._began_at >= INTERVAL_S:
            self._count_unlogged()
        self._lines += 1
        if self._lines > LINES_PER_INTERVAL:
            return
        text = visible(held.decode(errors="replace"))
        fields: dict[str, object] = {"program": self._program, "text": text[:LINE_CHARACTERS]}
        if cut_bytes or len(text) > LINE_CHARACTERS:
            fields["is_cut"] = True
        logger.info("printed", extra=fields)

    def _count_unlogged(self) -> None:
        if self._lines > LINES_PER_INTERVAL:
            fields = {"program": self._program, "lines": self._lines - LINES_PER_INTERVAL}
            logger.warning("prints too much, not logged", extra=fields)
        self._began_at, self._lines = self._now(), 0


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show what programs print on standard error while the body runs: for a command, which has no log."""

    class _Shower(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = vars(record)
            said = fields.get("text", f"prints too much: {fields.get('lines')} lines left out")
            print(f"{fields.get('program')}: {said}", file=sys.stderr)

    shower, level, passes_on = _Shower(), logger.level, logger.propagate
    logger.addHandler(shower)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(shower)
        logger.setLevel(level)
        logger.propagate = passes_on


class PrintingStream(io.RawIOBase):
    """Standard output or standard error of a daemon, for all Python code that is not the log."""

    def __init__(self, program: str, descriptor: int) -> None:
        self._lines = PrintedLines(program)
        self._descriptor = descriptor
        self._lock = threading.RLock()
        self._is_logging = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Return the real one, which children inherit."""
        return self._descriptor

    def write(self, printed: object) -> int:
        """Log whole lines. Never blocks."""
        chunk = bytes(printed)  # type: ignore[call-overload]
        with self._lock:
            # What logging itself prints of its own errors would be logged, and so on.
            if not self._is_logging:
                self._is_logging = True
                try:
                    self._lines.feed(chunk)
                finally:
                    self._is_logging = False
        return len(chunk)


def log_what_is_printed() -> None:
    """Make events of what Python code of this process prints from now on.

    What C code writes goes where it went: a message before an abort would be lost in this process.
    """
    sys.stdout, sys.stderr = (_stream(f"standard {name}", n) for n, name in ((1, "output"), (2, "error")))


def _stream(program: str, descriptor: int) -> TextIO:
    return io.TextIOWrapper(
        PrintingStream(program, descriptor),  # type: ignore[type-var]
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )
