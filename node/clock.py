"""Clocks: the shell holds one and passes ``now`` to pure code. Moments in words."""

import datetime
import time
from typing import Protocol


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


def moment(unix_s: float) -> str:
    """Return Unix seconds as a date and time, UTC."""
    try:
        return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:g} s"
