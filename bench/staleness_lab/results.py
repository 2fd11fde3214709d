"""Finished cells on disk, one line of JSON each: a run that was killed goes on where it was."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.staleness_lab.cells import Cell, Outcome


class Results:
    """The outcomes kept in one file.

    A line that was cut off by a kill is passed over, and its cell run again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, Outcome] = {}
        self._ends_in_newline = True
        if path.exists():
            text = path.read_text()
            self._ends_in_newline = not text or text.endswith("\n")
            self._outcomes = dict(_parsed(text))

    def __contains__(self, cell: Cell) -> bool:
        """Return whether this very cell is finished."""
        return cell.key in self._outcomes

    def of(self, cells: Iterable[Cell]) -> list[Outcome]:
        """Return the outcomes of those cells that are finished, in their order."""
        return [self._outcomes[cell.key] for cell in cells if cell in self]

    def all(self) -> list[Outcome]:
        """Return every outcome of the file, also of cells that are no longer asked for."""
        return list(self._outcomes.values())

    def add(self, outcome: Outcome) -> None:
        """Write an outcome so that it survives whatever happens next."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(("" if self._ends_in_newline else "\n") + outcome.to_line() + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._ends_in_newline = True
        self._outcomes[outcome.cell.key] = outcome

    def hours(self, cells: Iterable[Cell]) -> float:
        """Return the processor hours of cells; one that has not run takes as long as others of its kind.

        nan if there is a kind of which none has run.
        """
        measured: dict[tuple[str, bool, int], list[float]] = defaultdict(list)
        for outcome in self.all():
            measured[_kind(outcome.cell)].append(outcome.seconds)
        seconds = 0.0
        for cell in cells:
            known = [o.seconds for o in self.of([cell])] or measured[_kind(cell)]
            seconds += sum(known) / len(known) if known else float("nan")
        return seconds / 3600


def _kind(cell: Cell) -> tuple[str, bool, int]:
    """Key of cells that take about the same time."""
    return cell.task, cell.delay == "fixed", len(cell.seeds) * cell.versions


def _parsed(text: str) -> Iterator[tuple[str, Outcome]]:
    for line in text.splitlines():
        try:
            outcome = Outcome.from_fields(json.loads(line))
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
        yield outcome.cell.key, outcome
