"""Logs as events: a constant message and fields, for people on a terminal and for machines elsewhere.

    logger.info("step finished", extra={"version": 12, "step_s": 0.8})

    10:15:02.120 INFO    step finished  version=12 step_s=0.8  (learner/learner training_loop)
    {"time": "2026-11-21T10:15:02.120+00:00", "level": "info", "event": "step finished", ..., "version": 12}

Every record names a peer of the process: the one ``bind_peer`` set in the record's context, else all roles of
the process. A message that repeats is logged a few times a minute and then counted. An exception that ends
the process is an event too; a crash in native code leaves its traceback on standard error as text.

A thread of its own writes the daemon's log (``log_writer``), and what other Python code prints becomes events
(``printed_lines``): nobody waits for whoever reads standard error, and nobody forges a line of it.
"""

import contextlib
import contextvars
import datetime
import faulthandler
import json
import logging
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, TextIO

from node.telemetry.log_writer import LogWriter
from node.telemetry.printed_lines import log_what_is_printed
from node.text.visible_text import visible

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

logger = logging.getLogger(__name__)

OUR_PACKAGES: Final = ("node", "learner", "sampler", "deploy", "bench")
"""Logged at the configured level. Other packages are logged from WARNING on."""

_RESERVED: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

REPEATS_S: Final = 60.0
REPEATING_MESSAGES: Final = 1000
"""Counted at once: several times as many as our code has."""
WARNINGS_PER_INTERVAL: Final = 20
"""Lines of one message. A peer refused 1 400 times a second fills no disk, and 20 lines show what it does."""
STORY_PER_INTERVAL: Final = 3000
"""Lines of one message at INFO: far above the steps and batches of the fastest run."""

_writers: Final[list[LogWriter]] = []


class ForPeople(dict[str, object]):
    """A field of which text for people has only a part; one JSON object has all of it."""

    def __init__(self, whole: Mapping[str, object], *, shown: str) -> None:
        super().__init__(whole)
        self.shown: Final = shown


_peer: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("peer", default=None)


def bind_peer(*, role: str, node_id: str) -> None:
    """Name the peer in every later record of this context: of this task and the tasks it starts."""
    _peer.set((role, node_id))


def configure_process_logging(
    *, log_format: Literal["auto", "json", "human"], level: str, roles: Iterable[str]
) -> None:
    """Log records, uncaught exceptions and what is printed; nothing waits for who reads standard error."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    writer = LogWriter(os.dup(2), encoding=encoding)
    handler = configure_logging(log_format=log_format, level=level, roles=roles, stream=writer)
    writer.say_lost = handler.lost
    _writers.append(writer)
    log_what_is_printed()
    faulthandler.enable(_unwaiting(2))
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    sys.unraisablehook = _log_unraisable


def configure_logging(
    *,
    log_format: Literal["auto", "json", "human"],
    level: str,
    roles: Iterable[str],
    stream: TextIO | LogWriter | None = None,
) -> "BoundedHandler":
    """Send all records of the process to ``stream`` alone, standard error if None; return their handler."""
    stream = stream or sys.stderr
    process_role = "+".join(roles)
    handler = BoundedHandler(stream)
    is_human = log_format == "human" or (log_format == "auto" and stream.isatty())
    handler.setFormatter(HumanFormatter(process_role) if is_human else JsonFormatter(process_role))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    for package in OUR_PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
    logging.captureWarnings(True)
    return handler


def dropped_lines() -> int:
    """Return how many lines of this process's log were dropped because nobody read them."""
    return sum(writer.dropped for writer in _writers)


def _unwaiting(descriptor: int) -> int:
    """Return a descriptor of the same file for last words: a process that crashes waits for no reader, too.

    Opened anew, the file gets flags of its own. A socket cannot be opened: its descriptor is returned itself.
    """
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:
        return descriptor


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None:
        exc_info = (failed.exc_type, failed.exc_value, failed.exc_traceback)
        name = None if failed.thread is None else failed.thread.name
        logger.critical("uncaught exception in a thread", exc_info=exc_info, extra={"thread_name": name})


def _log_unraisable(failed: "UnraisableHookArgs") -> None:
    if failed.exc_value is not None:
        exc_info = (failed.exc_type, failed.exc_value, failed.exc_traceback)
        logger.error("exception nobody could catch", exc_info=exc_info, extra={"object": repr(failed.object)})


class BoundedHandler(logging.StreamHandler[TextIO | LogWriter]):
    """Writes records; of a message that repeats, the first few of each interval and then a count."""

    def __init__(self, stream: TextIO | LogWriter) -> None:
        super().__init__(stream)
        self._seen = Counter[tuple[str, int, str]]()
        self._began_at_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, after the counts that are due. Called with the handler's lock held."""
        if record.levelno >= logging.INFO:
            # Threads may be out of order by a little; a clock that was set back by more ends an interval.
            is_over = abs(record.created - self._began_at_s) >= REPEATS_S
            if is_over or len(self._seen) > REPEATING_MESSAGES:
                self._write_counts()
                self._began_at_s = record.created
            key = (record.name, record.levelno, str(record.msg))
            self._seen[key] += 1
            if self._seen[key] > _most(record.levelno):
                return
        super().emit(record)

    def close(self) -> None:
        """Write the counts that are left; ``logging.shutdown`` calls this at the end of the process."""
        with self.lock or contextlib.nullcontext():
            self._write_counts()
        if isinstance(self.stream, LogWriter):
            self.stream.close()
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Write that a record could not be: printing why, as logging does, would come back here."""
        failed = logging.LogRecord(
            record.name, logging.ERROR, "", 0, "event not logged", None, sys.exc_info()
        )
        vars(failed).update(message_=str(record.msg))
        with contextlib.suppress(Exception):  # a stream of a test, or of a command, that is closed
            self.stream.write(f"{self.format(failed)}\n")

    def lost(self, lines: int) -> str:
        """Return the line that tells of lines that nobody read."""
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, "log lines dropped", None, None)
        vars(record).update(lines=lines, detail=_LOST)
        return f"{self.format(record)}\n"

    def _write_counts(self) -> None:
        for (name, level, message), seen in self._seen.items():
            if seen > _most(level):
                record = logging.LogRecord(name, level, "", 0, "repeated, not logged", None, None)
                vars(record).update(repeated=message, times=seen - _most(level), within_s=REPEATS_S)
                super().emit(record)
        self._seen.clear()


_LOST: Final = "nobody read standard error: a stopped terminal, a pager, or a log collector that hung"


def _most(level: int) -> int:
    return STORY_PER_INTERVAL if level < logging.WARNING else WARNINGS_PER_INTERVAL


class _PeerFormatter(logging.Formatter):
    def __init__(self, process_role: str) -> None:
        super().__init__()
        self._process_role = process_role

    def _peer_of(self) -> tuple[str, str]:
        return _peer.get() or (self._process_role, "")


class JsonFormatter(_PeerFormatter):
    """Formats a record as one JSON object. A field whose name is taken gets an underscore."""

    def format(self, record: logging.LogRecord) -> str:
        role, node_id = self._peer_of()
        line: dict[str, object] = {
            "time": _instant(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "role": role,
            "node": node_id,
            "logger": record.name,
        }
        for key, value in _fields(record).items():
            line[f"{key}_" if key in line else key] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return to_json(line)


class HumanFormatter(_PeerFormatter):
    """Formats a record as text: local time, level, event, fields, peer."""

    def format(self, record: logging.LogRecord) -> str:
        time = _instant(record).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{key}={_word(value)}" for key, value in _fields(record).items())
        who = "/".join(filter(None, self._peer_of()))
        event = _below(record.getMessage())
        parts = (f"{time} {record.levelname:7} {event}", fields, f"({who} {record.name})")
        line = "  ".join(filter(None, parts))
        return f"{line}\n{'':4}{_below(self.formatException(record.exc_info))}" if record.exc_info else line


def to_json(value: object) -> str:
    """Return a value as strict JSON on one line: infinities and NaN as text, bytes as hexadecimal."""
    return json.dumps(_plain(value), allow_nan=False)


def _instant(record: logging.LogRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _RESERVED}


def _plain(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return value.hex()
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
        case _:
            return str(value)


def _below(text: str) -> str:
    """Return text of others as lines that no line of the log begins like."""
    return visible(text).replace("\n", f"\n{'':4}")


def _word(value: object) -> str:
    """Return a field as one line with a clear end, whatever a peer put into it."""
    if isinstance(value, ForPeople):
        return value.shown
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, str):
        return to_json(value)
    return value if value and value.isprintable() and " " not in value else json.dumps(value)
