"""Who is told when something changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Listeners:
    """Calls each listener, on the thread of whoever tells: a listener must not block."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], object]] = []

    @contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call ``listener`` whenever there is something to tell, for the time of the body."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def notify(self) -> None:
        """Call everyone."""
        for listener in tuple(self._listeners):
            listener()
