"""Logs as events: a constant message and fields, for people on a terminal and for machines elsewhere.

    _log.info("step finished", extra={"version": 12, "step_s": 0.8})

    10:15:02.120 INFO    step finished  version=12 step_s=0.8  (learner/learner learner.training_loop)
    {"time": "2026-11-21T10:15:02.120+00:00", "level": "info", "event": "step finished", ..., "version": 12}

Every record says which peer of the process it is about: what ``bind_peer`` said in the context it
was made in, else all roles of the process.
"""

import contextvars
import datetime
import json
import logging
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Final, Literal, TextIO

OUR_PACKAGES: Final = ("node", "learner", "sampler", "deploy", "bench")
"""Logged at the configured level. Everybody else has to have a warning to be heard."""

_RESERVED: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_peer: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("peer", default=None)


def bind_peer(*, role: str, node_id: str) -> None:
    """Name the peer in every record made from here on in this context: this task and those it starts."""
    _peer.set((role, node_id))


def configure_logging(
    *,
    log_format: Literal["auto", "json", "human"],
    level: str,
    roles: Iterable[str],
    stream: TextIO | None = None,
) -> None:
    """Send all records of the process to ``stream``, standard error if None; replaces what was there."""
    stream = stream or sys.stderr
    is_human = log_format == "human" or (log_format == "auto" and stream.isatty())
    process_role = "+".join(roles)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(HumanFormatter(process_role) if is_human else JsonFormatter(process_role))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    for package in OUR_PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
    logging.captureWarnings(True)


class _PeerFormatter(logging.Formatter):
    def __init__(self, process_role: str) -> None:
        super().__init__()
        self._process_role = process_role

    def _peer_of(self) -> tuple[str, str]:
        return _peer.get() or (self._process_role, "")


class JsonFormatter(_PeerFormatter):
    """One JSON object a line. A field whose name is taken gets an underscore."""

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
    """A line for people: local time, level, event, fields, who."""

    def format(self, record: logging.LogRecord) -> str:
        time = _instant(record).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{key}={_word(value)}" for key, value in _fields(record).items())
        who = "/".join(filter(None, self._peer_of()))
        parts = (f"{time} {record.levelname:7} {record.getMessage()}", fields, f"({who} {record.name})")
        line = "  ".join(filter(None, parts))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def to_json(value: object) -> str:
    """Write a value as strict JSON on one line: infinities and NaN as text, bytes as hexadecimal."""
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


def _word(value: object) -> str:
    """Write a field so that it is one line and has an end, whatever a peer put into it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, str):
        return to_json(value)
    return value if value and value.isprintable() and " " not in value else json.dumps(value)
