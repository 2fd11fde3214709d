"""Captures standard output and error of a process, and logs what native code writes there as events.

    native code, crash dumps --pipe--> a small forked process --one JSON object a line--> the log
    our own records --------------------------------------------------------------------^

The process at the end of the pipe is forked before anything heavy is loaded. It outlives ours long enough to
log the last words of a crash, which a thread could not. It ends when every writer has ended, and no signal
but SIGKILL ends it before.
"""

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Final, NoReturn, TextIO

from node.telemetry.stderr_events import StderrEvent, StderrParser, StderrRepeatLimit

QUIET_S: Final = 0.1
"""Lines that follow each other faster than this are one event, such as a traceback."""

_READ_BYTES: Final = 64 << 10
_STANDARD_OUTPUT: Final = 1
_STANDARD_ERROR: Final = 2

FormatRecord = Callable[[logging.LogRecord], str]


def capture_standard_error(format_record: FormatRecord) -> TextIO:
    """Capture standard output and error of this process; return the stream its log goes to from now on.

    Call it before threads are started and before anything heavy is imported.

    Args:
        format_record: formats a record as one line; runs in the forked process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    log = os.dup(_STANDARD_ERROR)
    # A supervisor that signals the whole process group must not end the fork, not even as it starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if os.fork() == 0:
        os.close(writing)
        _relay(reading, log, format_record)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(reading)
    for captured in (_STANDARD_OUTPUT, _STANDARD_ERROR):
        os.dup2(writing, captured)
    os.close(writing)
    return os.fdopen(log, "w", encoding="utf-8", errors="backslashreplace")


def _relay(reading: int, log: int, format_record: FormatRecord) -> NoReturn:
    """Log what arrives until the last writer has closed its end."""
    exit_code = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        with os.fdopen(log, "w", encoding="utf-8", errors="backslashreplace") as out:
            _copy(reading, out, format_record)
        exit_code = 0
    finally:
        os._exit(exit_code)  # a fork must not run its parent's exit handlers


def _copy(reading: int, out: TextIO, format_record: FormatRecord) -> None:
    text, bound = StderrParser(), StderrRepeatLimit()
    is_open = True
    while is_open:
        if not text.is_empty and not select.select([reading], [], [], QUIET_S)[0]:
            events = text.flush()
        else:
            data = os.read(reading, _READ_BYTES)
            is_open = bool(data)
            events = text.feed(data) if is_open else text.flush()
        for event in bound.passed(events, now=time.monotonic()):
            out.write(format_record(_record(event)) + "\n")
        out.flush()


def _record(event: StderrEvent) -> logging.LogRecord:
    level = logging.getLevelNamesMapping()[event.level.upper()]
    record = logging.LogRecord("native", level, "", 0, event.event, None, None)
    vars(record).update(text=event.text, **({"source": event.source} if event.source else {}))
    return record
