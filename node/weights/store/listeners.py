"""Callbacks to call when something changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Listeners:
    """Calls each listener on the notifying thread: a listener must not block."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], object]] = []

    @contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call ``listener`` at each ``notify`` for the time of the body."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def notify(self) -> None:
        """Call every listener."""
        for listener in tuple(self._listeners):
            listener()
