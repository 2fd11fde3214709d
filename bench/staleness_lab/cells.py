"""A cell of the table: one method on one task at one staleness, with all its seeds; and its outcome."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

_REVISION: Final = 1
"""Raised whenever a change makes finished cells incomparable: they are then run again."""

Purpose = Literal["tune", "table"]


@dataclass(frozen=True, slots=True)
class Cell:
    """All that determines a run, machine and torch version aside."""

    purpose: Purpose
    task: str
    method: str
    recipe: str
    """The method with all its numbers, see ``methods.described``: others are another cell."""
    delay: str
    staleness: int
    """Versions; see ``delays``."""
    learning_rate: float
    seeds: tuple[int, ...]
    versions: int
    """Optimizer steps."""

    @property
    def key(self) -> str:
        """Give a digest under which a finished cell is found again."""
        text = json.dumps([_REVISION, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cell showed."""

    cell: Cell
    scores: tuple[tuple[float, ...], ...]
    """Held-out score at evenly spaced versions, the first and the last among them: one curve a seed."""
    measures: dict[str, tuple[float | None, ...]]
    """Means over the seeds and over tenths of the run, by the names in ``measures``; None: not finite."""
    skipped: float
    """Share of (seed, version) whose gradient was not finite: no step was taken there."""
    seconds: float
    """Processor time."""

    def to_line(self) -> str:
        """Give one line of JSON, without its newline."""
        return json.dumps({"key": self.cell.key, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Outcome":
        """Take what ``to_line`` gave, parsed.

        Raises:
            KeyError, TypeError: a field is missing or foreign.
        """
        cell = Cell(**{**fields["cell"], "seeds": tuple(fields["cell"]["seeds"])})
        return cls(
            cell=cell,
            scores=tuple(tuple(curve) for curve in fields["scores"]),
            measures={name: tuple(values) for name, values in fields["measures"].items()},
            skipped=fields["skipped"],
            seconds=fields["seconds"],
        )
