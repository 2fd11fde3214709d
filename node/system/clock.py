"""Clocks: the shell holds one and passes ``now`` to pure code. Moments in words."""

import datetime
import time
from typing import Final, Protocol


class Clock(Protocol):
    """The source of time for the shell."""

    def now(self) -> float:
        """Return Unix seconds: comparable with other peers', may jump."""
        ...

    def monotonic(self) -> float:
        """Return seconds that only grow, from an arbitrary start."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


_MOMENT: Final = "%Y-%m-%d %H:%M:%S UTC"


def moment(unix_s: float) -> str:
    """Return Unix seconds as a date and time, UTC."""
    try:
        return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime(_MOMENT)
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:g} s"


def moment_at_start(text: str) -> tuple[float | None, str]:
    """Return the Unix seconds of a ``moment`` that a text begins with, and the rest; None: with no moment."""
    length = len("2026-01-01 00:00:00 UTC")
    try:
        found = datetime.datetime.strptime(text[:length], _MOMENT)
    except ValueError:
        return None, text
    return found.replace(tzinfo=datetime.UTC).timestamp(), text[length:].strip()
