"""Time as an argument: the shell holds a Clock, pure code receives ``now``."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where the shell takes the time from."""

    def now(self) -> float:
        """Give Unix seconds: comparable with other peers, may jump."""
        ...

    def monotonic(self) -> float:
        """Give seconds that only grow, from an arbitrary start."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()
