"""The confirming report: plainer forms of the default on tasks new to all of them, and the rule by which one
of them takes its place. All of it was committed before any of these tasks had run off policy.

Where it comes from: the first report (see ``plan``) was seen, and showed two things that its rule had not
asked for. Without any weight, the trust region alone, the default was ahead in 5 of 24 places and behind in
none; and on *prices* the methods ahead do not divide the advantage by the deviation of a group's rewards.

Tasks: versions and learning rates were chosen with GRPO, with fresh groups, on seeds 1000 and 1001. Nothing
else has run on them.

The rule. Beside today's default, on the same seeds, a place counts where all four forms have run; the three
differences of a place are one family. A form may be the default if

    it is behind by an interval in no more places than it is ahead by one,
    no place where it is behind by an interval has a mean of more than 2 points behind,
    it is behind by an interval in no place with flipped rewards, and the mean of its differences there is
    not more than 1 point behind: rewards from the Internet can be wrong, and what a form loses by that is not
    made good by what it gains elsewhere.

Of the forms that may, the plainest is the default; today's always may, and is the least plain. The rivals are
there for orientation, and decide nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.staleness_lab.cells import Cell, Outcome, Setting
from bench.staleness_lab.plan import (
    FLIPPED,
    FRESH,
    HUMPS,
    LATE,
    MODEL_FLIPPED,
    MODEL_HUMPS,
    OLD,
    QUANTISED,
    SAMPLERS,
    Row,
    TaskPlan,
    cell_of,
)
from bench.staleness_lab.report import differences, places
from bench.staleness_lab.statistics import Interval

TODAY: Final = "plain, weighs completions"
"""The default when this was written."""

PLAINER: Final = (
    "undivided, weighs nothing",
    "plain, weighs nothing",
    "undivided, weighs completions",
)
"""From the plainest: neither a division nor a weight; no weight; no division."""

MOST_BEHIND: Final = 0.02
"""Score by which no place may be behind where an interval says so."""
MOST_BEHIND_FLIPPED: Final = 0.01
"""Score by which the places with flipped rewards may be behind in the mean."""

TASKS: Final[Mapping[str, TaskPlan]] = {
    "colours": TaskPlan(600, 3e-2, tuple(range(60, 72))),
    "intervals": TaskPlan(600, 1e-2, tuple(range(60, 72))),
    "unpacking": TaskPlan(200, 1e-3, tuple(range(60, 66))),
}

_ROWS: Final = (HUMPS, FLIPPED, OLD, SAMPLERS, LATE, QUANTISED, FRESH)
_MODEL_ROWS: Final = (MODEL_HUMPS, MODEL_FLIPPED, LATE)
_WAVES: Final[tuple[tuple[tuple[str, ...], tuple[Row, ...]], ...]] = (
    (("colours", "intervals"), _ROWS),
    (("unpacking",), _MODEL_ROWS),
)


def confirming_cells(settings: Mapping[str, Setting]) -> list[Cell]:
    """Return the cells in the order in which they run: those that decide, then those of rivals."""
    forms = (TODAY, *PLAINER)
    rivals = tuple(method for method in settings if method not in forms)
    return [
        cell_of(task, TASKS[task], row, method, settings[method])
        for methods in (forms, rivals)
        for tasks, rows in _WAVES
        for row in rows
        for task in tasks
        for method in methods
    ]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a form does beside today's default, place by place."""

    form: str
    intervals: Mapping[tuple[str, Row], Interval]

    def count(self, verdict: str) -> int:
        """Return in how many places the interval says ``better``, ``tied`` or ``worse``."""
        return sum(each.verdict == verdict for each in self.intervals.values())

    @property
    def flipped_mean(self) -> float:
        """Return the mean difference where rewards are flipped; 0 where none has run."""
        means = [each.mean for each in self._flipped()]
        return float(np.mean(means)) if means else 0.0

    @property
    def objections(self) -> list[str]:
        """Return what the rule has against the form; nothing: it may be the default."""
        found = []
        if self.count("worse") > self.count("better"):
            found.append("behind in more places than ahead")
        if any(i.verdict == "worse" and i.mean < -MOST_BEHIND for i in self.intervals.values()):
            found.append("more than 2 points behind somewhere")
        if any(each.verdict == "worse" for each in self._flipped()):
            found.append("behind where rewards are flipped")
        if self.flipped_mean < -MOST_BEHIND_FLIPPED:
            found.append("more than 1 point behind in the mean where rewards are flipped")
        return found

    def _flipped(self) -> list[Interval]:
        return [each for (_, row), each in self.intervals.items() if row.mismatch == "flipped"]


def standings(outcomes: Sequence[Outcome]) -> list[Standing]:
    """Return the standing of each plainer form, the plainest first, over the places where all have run."""
    forms = (TODAY, *PLAINER)
    complete = {
        place: differences({form: here[form] for form in forms}, to=TODAY)
        for place, here in places(outcomes).items()
        if all(form in here for form in forms)
    }
    return [Standing(form, {place: each[form] for place, each in complete.items()}) for form in PLAINER]


def chosen(found: Sequence[Standing]) -> str:
    """Return the form that the rule makes the default."""
    allowed = [each.form for each in found if each.intervals and not each.objections]
    return allowed[0] if allowed else TODAY
