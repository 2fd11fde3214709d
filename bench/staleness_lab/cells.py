"""A cell: one method with one setting on one task at one staleness, with all its seeds; and its outcome."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_REVISION: Final = 3
"""Raised whenever a change makes finished cells incomparable: they are then run again."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Setting:
    """The numbers a method runs with."""

    rate: float = 1.0
    """Multiple of the task's learning rate."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """To the recipe, as ``Recipe.changed`` has them."""

    def __str__(self) -> str:
        """Write the setting as it stands in tables."""
        rate = [] if self.rate == 1 else [f"rate x {self.rate:.3g}"]
        return ", ".join([*rate, *(f"{name} {value}" for name, value in self.changes.items())]) or "defaults"


@dataclass(frozen=True, slots=True)
class Cell:
    """All that determines a run, machine and torch version aside."""

    task: str
    method: str
    setting: Setting
    recipe: str
    """The method with all its numbers as they were, see ``Recipe``: others are another cell."""
    delay: str
    staleness: int
    """Versions; see ``delays``."""
    mismatch: str
    """See ``mismatch``."""
    learning_rate: float
    """The setting's."""
    seeds: tuple[int, ...]
    versions: int

    @property
    def key(self) -> str:
        """Return a digest under which a finished cell is found again."""
        text = json.dumps([_REVISION, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a cell."""

    cell: Cell
    scores: tuple[tuple[float, ...], ...]
    """Held-out score at evenly spaced versions, the first and the last among them: one curve a seed."""
    skipped: float
    """Share of (seed, step) whose gradient was not finite: no step was taken there."""
    seconds: float
    """Processor time."""

    @property
    def ends(self) -> Floats:
        """Return where each seed ends: the mean of its last three evaluations, [seeds]."""
        ends: Floats = np.asarray(self.scores, dtype=np.float64)[:, -3:].mean(axis=1)
        return ends

    def to_line(self) -> str:
        """Return one line of JSON, without its newline."""
        return json.dumps({"key": self.cell.key, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Outcome":
        """Return what ``to_line`` wrote, from its parsed fields.

        Raises:
            KeyError, TypeError: a field is missing or foreign.
        """
        cell = fields["cell"]
        return cls(
            cell=Cell(**{**cell, "seeds": tuple(cell["seeds"]), "setting": Setting(**cell["setting"])}),
            scores=tuple(tuple(curve) for curve in fields["scores"]),
            skipped=fields["skipped"],
            seconds=fields["seconds"],
        )
