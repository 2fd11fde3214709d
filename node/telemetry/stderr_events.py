"""Parses what native code writes to standard error into events; pure.

gRPC, CUDA, the C library and a crashing interpreter each have their own format. A line of gRPC becomes an
event with its level and source; other lines that arrive together become one event, a warning unless they are
progress bars.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from node.telemetry.repeat_limit import RepeatLimit

_ABSEIL: Final = re.compile(rb"([IWEF])\d{4} [\d:.]+ +\d+ ([\w./+-]+:\d+)\] (.*)", re.DOTALL)
"""Level, month and day, time, thread, file:line, text: how gRPC writes."""
_ABSEIL_LEVELS: Final = {
    b"I": "info",
    b"W": "warning",
    b"E": "error",
    b"F": "critical",
}
_PROGRESS: Final = re.compile(rb"\d%.*\|.*/\S+ \[\d[\d:]*<")
"""A progress bar of tqdm: vLLM draws them while it loads."""
_PREAMBLE: Final = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"

NATIVE: Final = "native message"
PLAIN: Final = "standard error"

TEXT_BYTES: Final = 64 << 10
"""Longest text of one event; a longer one is split."""

NATIVE_PER_MINUTE: Final = 10
"""Of one place in a source file: strangers can make handshakes fail as often as they like."""
PLAIN_PER_MINUTE: Final = 100


@dataclass(frozen=True, slots=True)
class StderrEvent:
    """An event parsed from standard error."""

    level: str
    event: str
    text: str
    source: str = ""
    """file:line, where the text has it."""


class StderrParser:
    """Splits a stream of bytes into events."""

    def __init__(self) -> None:
        self._unfinished = b""
        self._plain: list[bytes] = []
        self._plain_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Return whether no text is waiting for more."""
        return not self._unfinished and not self._plain

    def feed(self, data: bytes) -> list[StderrEvent]:
        """Return the events that ``data`` completes."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        events = [event for line in lines for event in self._line(line)]
        if len(self._unfinished) > TEXT_BYTES:
            line, self._unfinished = self._unfinished, b""
            events += self._line(line)
        return events

    def flush(self) -> list[StderrEvent]:
        """Return the text that was waiting for more as events."""
        line, self._unfinished = self._unfinished, b""
        return [*(self._line(line) if line else ()), *self._plain_event()]

    def _line(self, line: bytes) -> list[StderrEvent]:
        if line.startswith(_PREAMBLE):
            return []
        if match := _ABSEIL.fullmatch(line):
            level, source, text = match.groups()
            native = StderrEvent(_ABSEIL_LEVELS[level], NATIVE, _text(text), source.decode())
            return [*self._plain_event(), native]
        self._plain += line.strip(b"\r").split(b"\r")
        self._plain_bytes += len(line) + 1
        return self._plain_event() if self._plain_bytes > TEXT_BYTES else []

    def _plain_event(self) -> list[StderrEvent]:
        bars = [line for line in self._plain if _PROGRESS.search(line)]
        text = _text(b"\n".join(line for line in self._plain if line not in bars)).strip("\n")
        self._plain, self._plain_bytes = [], 0
        if text.strip():
            return [StderrEvent("warning", PLAIN, text)]
        return [StderrEvent("info", PLAIN, _text(bars[-1]))] if bars else []


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


class StderrRepeatLimit:
    """Bounds how often events from one source are logged, and reports how many were not."""

    def __init__(self) -> None:
        self._native = RepeatLimit[tuple[str, str]](passed=NATIVE_PER_MINUTE, interval_s=60)
        self._plain = RepeatLimit[tuple[str, str]](passed=PLAIN_PER_MINUTE, interval_s=60)

    def passed(self, events: Iterable[StderrEvent], *, now: float) -> Iterator[StderrEvent]:
        """Return the events to be logged at ``now``, seconds."""
        for event in events:
            limit = self._native if event.event == NATIVE else self._plain
            decision = limit.decide((event.level, event.source), now=now)
            for suppressed in decision.suppressed:
                level, source = suppressed.key
                yield StderrEvent(
                    level, event.event, f"{suppressed.count} more were not logged within a minute", source
                )
            if decision.passes:
                yield event
