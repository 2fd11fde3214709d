"""Writes the log from a thread of its own: whoever logs never waits for whoever reads.

    write(line) -> queue, bounded in bytes -> thread -> descriptor
                     '- full: the line is dropped and counted; once there is room again, a line says how many

A terminal stopped with Ctrl-S, a pager, or a log collector that hangs lets write(2) wait for ever. That stops
this thread and nothing else. ``close`` waits only as long as lines go out.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

QUEUE_BYTES: Final = 1 << 20
"""Three thousand lines: minutes of a busy run, and little beside a role's own memory."""

_RESUMED_BYTES_RATIO: Final = 0.5
"""After a drop, lines are taken in again once the queue holds at most this share of its bound. Otherwise each
line that goes out would let one in, with a gap on both sides."""

CLOSE_S: Final = 0.5
"""How long ``close`` waits for a line that does not go out; a local pipe takes one in far less."""

CLOSE_LIMIT_S: Final = 5.0
"""How long ``close`` waits in all, for a reader that is slow."""

_CHUNK_BYTES: Final = 4096
"""Written at once: as much as a pipe takes whole, so that other processes' lines do not come between."""


class LogWriter:
    """A text stream that never blocks its writers, for ``logging.StreamHandler``; any thread.

    Attributes:
        say_lost: Returns the line that tells how many lines were dropped.
    """

    def __init__(
        self, descriptor: int, *, encoding: str = "utf-8", queue_bytes: int = QUEUE_BYTES, name: str = "log"
    ) -> None:
        """Write to ``descriptor``, which stays open; what ``encoding`` lacks is written as its escape."""
        self._descriptor = descriptor
        self._encoding = encoding
        self._queue_bytes = queue_bytes
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._written = 0
        self._untold = 0
        self._is_full = False
        self._is_writing = False
        self._is_closed = False
        self._changed = threading.Condition()
        self.say_lost: Callable[[int], str] = "{} lines of the log were dropped: nobody read them\n".format
        self.dropped = 0
        """Lines, so far."""
        threading.Thread(target=self._write_all, name=name, daemon=True).start()

    def write(self, text: str) -> int:
        """Queue whole lines, or drop them where the queue is full. Never blocks, never raises OSError."""
        line = text.encode(self._encoding, "backslashreplace")
        with self._changed:
            room = self._queue_bytes * (_RESUMED_BYTES_RATIO if self._is_full else 1.0)
            self._is_full = self._queued_bytes + len(line) > room
            if self._is_full:
                self._drop()
            else:
                self._tell_of_drops()
                self._put(line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes as fast as it can."""

    def isatty(self) -> bool:
        """Return whether a person reads along."""
        return os.isatty(self._descriptor)

    def close(self) -> None:
        """Wait until all is written; for CLOSE_S where nothing goes out, for CLOSE_LIMIT_S in all."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for _ in range(int(CLOSE_LIMIT_S / CLOSE_S)):
                before = self._written
                if self._changed.wait_for(self._is_idle, CLOSE_S) or self._written == before:
                    return

    def _is_idle(self) -> bool:
        return not (self._queue or self._is_writing or self._untold)

    def _drop(self) -> None:
        self.dropped += 1
        self._untold += 1

    def _tell_of_drops(self) -> None:
        if self._untold:
            lost, self._untold = self._untold, 0
            self._put(self.say_lost(lost).encode(self._encoding, "backslashreplace"))

    def _put(self, line: bytes) -> None:
        self._queue.append(line)
        self._queued_bytes += len(line)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while (line := self._next()) is not None:
            is_written = self._written_whole(line)
            with self._changed:
                self._is_writing = False
                if is_written:
                    self._written += 1
                else:
                    self.dropped += 1  # it is not told: where one line fails, the next does
                self._changed.notify_all()

    def _next(self) -> bytes | None:
        with self._changed:
            if not self._queue:
                self._is_full = False
                self._tell_of_drops()
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if not self._queue:
                return None
            line = self._queue.popleft()
            self._queued_bytes -= len(line)
            self._is_writing = True
            return line

    def _written_whole(self, line: bytes) -> bool:
        """Write a line; return False where it cannot be: nobody is left to read it, or the disk is full."""
        while line:
            try:
                line = line[os.write(self._descriptor, line[:_CHUNK_BYTES]) :]
            except BlockingIOError:
                # Another process that shares it has set O_NONBLOCK.
                room = select.poll()
                room.register(self._descriptor, select.POLLOUT)
                room.poll()
            except OSError:
                return False
        return True
