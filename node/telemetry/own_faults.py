"""Faults of this very process: told before anything that its peers wait for, since they wait for this.

    works --failed--> faulty --works, SETTLED_S after the last failure--> works
                        '--no failure for FORGOTTEN_S, where nobody says that it works--> works

A full disk takes small writes now and then, and large ones do not fit: one success ends no fault.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SETTLED_S: Final = 10.0
"""Peers send again what was refused after 0 to 30 s; a fault that lasts shows itself within this time."""

FORGOTTEN_S: Final = 60.0
"""Two of the longest pauses between retries."""


@dataclass(frozen=True, slots=True)
class OwnFault:
    """Something in this process that does not work."""

    what: str
    """A sentence without its full stop: "the ledger could not be written: disk full"."""
    fix: str
    for_s: float
    """Since it first failed."""


@dataclass(slots=True)
class _Failing:
    what: str
    fix: str
    since_s: float
    last_s: float


class OwnFaults:
    """The faults of one process, by the part that has them. Any thread."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._failing: dict[str, _Failing] = {}
        self._told: set[str] = set()
        """Parts that say when they work."""

    def failed(self, part: str, what: str, *, fix: str) -> None:
        """Note that a part failed now."""
        now = self._monotonic()
        with self._lock:
            self._expire(now)
            since_s = self._failing[part].since_s if part in self._failing else now
            self._failing[part] = _Failing(what, fix, since_s, now)

    def works(self, part: str) -> None:
        """Note that a part worked now."""
        now = self._monotonic()
        with self._lock:
            self._told.add(part)
            if part in self._failing and now - self._failing[part].last_s >= SETTLED_S:
                del self._failing[part]

    def first(self) -> OwnFault | None:
        """Return the fault that has lasted longest, of a part that says when it works if there is one."""
        now = self._monotonic()
        with self._lock:
            self._expire(now)
            order = sorted(
                self._failing, key=lambda part: (part not in self._told, self._failing[part].since_s)
            )
            if not order:
                return None
            found = self._failing[order[0]]
            return OwnFault(found.what, found.fix, now - found.since_s)

    def _expire(self, now: float) -> None:
        for part in [part for part in self._failing if part not in self._told]:
            if now - self._failing[part].last_s >= FORGOTTEN_S:
                del self._failing[part]
