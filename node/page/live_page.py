"""The page ``/`` of a process's telemetry port: the run as this process knows it, for those without Grafana.

    threads of the telemetry port --> render --> the sections of each role of the process

Nothing is worked out until somebody looks, and then once in REFRESH_S however many look.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Final

from node.page.html import rendered
from node.page.section import Section
from node.system.clock import Clock, moment

REFRESH_S: Final = 5


class LivePage:
    """The page of one process, to which its roles add their parts as they start."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._run_id = ""
        self._parts: list[Callable[[], Iterable[Section]]] = []
        self._is_moving = False
        self._lock = threading.Lock()
        self._shown = b""
        self._fresh_until_s = float("-inf")

    def add(self, run_id: str, sections: Callable[[], Iterable[Section]], *, is_moving: bool = False) -> None:
        """Show a role's sections below those that are there.

        Args:
            sections: called in any thread but the event loop's; may raise TimeoutError.
            is_moving: let browsers ask again every REFRESH_S; else a reader is left in peace.
        """
        self._run_id = run_id
        self._parts.append(sections)
        self._is_moving |= is_moving

    def render(self) -> bytes | None:
        """Return the page, REFRESH_S old unless a part fails; None: no role shows anything. Any thread.

        Raises TimeoutError: a part did not answer in time, or never has.
        """
        if not self._parts:
            return None
        now = self._clock.monotonic()
        if now >= self._fresh_until_s and self._lock.acquire(blocking=False):
            try:
                self._fresh_until_s = now + REFRESH_S  # also where a part does not answer
                self._shown = self._rendered()
            finally:
                self._lock.release()
        if not self._shown:
            raise TimeoutError("this process has not answered yet")
        return self._shown

    def _rendered(self) -> bytes:
        sections = [section for part in self._parts for section in part()]
        anew = f"; anew every {REFRESH_S} s" if self._is_moving else ""
        note = f"{moment(self._clock.now())}, by this machine's clock{anew}"
        return rendered(self._run_id, note, sections, refresh_s=REFRESH_S if self._is_moving else None)
