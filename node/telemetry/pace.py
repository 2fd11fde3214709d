"""How fast a counter grows, over the last minute."""

from collections import deque
from collections.abc import Callable
from typing import Final

WINDOW_S: Final = 60.0


class Pace:
    """A counter, looked at now and then; one thread."""

    def __init__(self, total: Callable[[], float], *, monotonic: Callable[[], float]) -> None:
        self._total = total
        self._monotonic = monotonic
        self._looks: deque[tuple[float, float]] = deque([(monotonic(), total())])

    def per_s(self) -> float:
        """Return its mean growth per second since the look ``WINDOW_S`` ago, or since the first one."""
        now, total = self._monotonic(), self._total()
        self._looks.append((now, total))
        while len(self._looks) > 2 and self._looks[1][0] <= now - WINDOW_S:
            self._looks.popleft()
        since_s, before = self._looks[0]
        return (total - before) / (now - since_s) if now > since_s else 0.0
