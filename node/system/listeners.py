"""Listeners to the changes of one thing, each for as long as it listens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Listener: TypeAlias = Callable[[], object]
"""Called on the thread that makes a change: it must not block."""


class Listeners:
    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Call ``listener`` at each change while the body runs."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def notify(self) -> None:
        """Call each of them, in the order in which they came."""
        for listener in tuple(self._listeners):
            listener()
