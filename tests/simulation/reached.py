"""Counters in the place of metrics: what a run reached, by instrument and labels."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Instruments:
    """Takes whatever a component measures; no instrument decides anything."""

    def __init__(self, reached: Counter[str]) -> None:
        self._reached = reached
        self._made: dict[str, _Instrument] = {}

    def __getattr__(self, name: str) -> Any:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = _Instrument(name, self._reached)
        return made


class _Instrument:
    def __init__(self, name: str, reached: Counter[str]) -> None:
        self._name = name
        self._reached = reached

    def __call__(self, *arguments: object, **options: object) -> None:
        """Show something; not counted."""

    def labels(self, *values: object) -> "_Instrument":
        return _Instrument(f"{self._name} {' '.join(map(str, values))}", self._reached)

    def inc(self, amount: float = 1) -> None:
        if amount:
            self._reached[self._name] += 1

    def set(self, value: float) -> None:
        """Show a value; not counted."""

    def observe(self, value: float) -> None:
        """Show a value; not counted."""

    def set_function(self, function: Callable[[], float]) -> None:
        """Show a value; not counted."""


class NamedWaits:
    """The open waits of a process by name, as ``NodeMetrics`` keeps them."""

    def __init__(self, reached: Counter[str]) -> None:
        self._reached = reached
        self._open: dict[int, str] = {}
        self._number = 0

    @property
    def waits_for(self) -> str:
        return next(iter(self._open.values()), "")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        self._number += 1
        number = self._number
        self._open[number] = what
        self._reached[f"waits for {what}"] += 1
        try:
            yield
        finally:
            del self._open[number]
