"""Arms: how many learners, merged how; all consume the same number of groups, from the same seeds."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Self, get_args

import numpy as np
from numpy.typing import NDArray

from learner.merging.merge_settings import MergeSettings, Method

LEARNERS: Final = (2, 4)
LOCAL_STEPS: Final = (1, 4, 8)
RATES: Final = ((1.0, 0.0), (0.7, 0.5), (0.7, 0.9))
"""Outer rate and momentum; the last is the published one, which settings refuse where changes are delayed."""

_SIMULATED: Final = (
    *("local_steps", "outer_rate", "outer_momentum", "overlap", "fragments", "trains_a_fragment"),
    *("compression", "rank", "share"),
)
"""Settings that decide how a cell ends; who is waited for, and for how long, does not."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """How a task is trained."""

    groups: int
    """Consumed by every arm; a multiple of a round of four learners and eight steps."""
    learning_rate: float
    """Adam's for one learner."""
    overlapped_rate: float
    """Part of the rate of changes that are waited for at which those that come a round late learn best,
    unless each round trains another fragment."""
    local_steps: tuple[int, ...]
    """Local steps (H) in the arms that compare overlaps and rates."""


TASKS: Final = {"safes": TaskPlan(6400, 1e-2, 1.0, LOCAL_STEPS), "sorting": TaskPlan(5120, 1e-3, 0.5, (4,))}
"""Tasks of the staleness laboratory: a table of 2048 logits, and a language model of 13 tensors and more."""


@dataclass(frozen=True)
class Arm:
    """A number of learners and how they are merged."""

    name: str
    learners: int
    settings: MergeSettings


ONE_LEARNER: Final = Arm("one learner", 1, MergeSettings(method="in_step"))
"""Merged with nobody: it takes Adam's steps as they are."""


def arms(plan: TaskPlan) -> Iterator[Arm]:
    """Yield every arm: one learner, each method as it is set, then overlaps by local steps and rates."""
    yield ONE_LEARNER
    for learners in LEARNERS:
        for method in get_args(Method):
            yield Arm(method, learners, MergeSettings(method=method))
        yield Arm("dilocox as published", learners, MergeSettings(method="dilocox", overlap="delayed"))
    for learners in LEARNERS:
        for local_steps in plan.local_steps:
            for overlap in ("wait", "eager", "delayed"):
                for rate, momentum in RATES:
                    rates = {"outer_rate": rate, "outer_momentum": momentum}
                    plain = MergeSettings(method="diloco", local_steps=local_steps, overlap=overlap)
                    name = f"{overlap}, H {local_steps}, {rate:g}/{momentum:g}"
                    yield Arm(name, learners, plain.model_copy(update=rates))  # not checked: .7/.9 is here


@dataclass(frozen=True)
class Cell:
    """An arm on a task with all its seeds."""

    task: str
    arm: Arm
    plan: TaskPlan
    seeds: tuple[int, ...]

    @property
    def learning_rate(self) -> float:
        """Return Adam's rate at each learner."""
        settings = self.arm.settings
        taken_over = settings.outer_rate / (1 - settings.outer_momentum)  # of a change, in the end
        is_waited_for = settings.overlap == "wait" or settings.trains_a_fragment
        part = 1.0 if is_waited_for else self.plan.overlapped_rate
        return self.plan.learning_rate * self.arm.learners * part / taken_over

    @property
    def key(self) -> str:
        """Return under which an outcome is found again."""
        settings = self.arm.settings.model_dump()
        return _key(
            *(self.task, self.arm.name, self.arm.learners, settings),
            *(self.learning_rate, self.plan.groups, self.seeds),
        )


@dataclass(frozen=True)
class Outcome:
    """The result of a cell."""

    task: str
    name: str
    learners: int
    settings: dict[str, Any]
    learning_rate: float
    groups: int
    seeds: tuple[int, ...]
    rounds: int
    scores: tuple[tuple[float, ...], ...]
    """Held-out score of the newest version after each evaluation's groups: one curve a seed."""
    entries: int
    """Parameters of the model."""
    sent_bytes: float
    """By one learner in the whole run, mean over learners and seeds."""
    norm_growth: float
    """Norm of the merged changes in the last quarter of the rounds over the first's, median of seeds."""
    alarms: int
    """Seeds in which norms grew as in divergence."""

    @property
    def key(self) -> str:
        """Return the key of its cell."""
        return _key(
            *(self.task, self.name, self.learners, self.settings),
            *(self.learning_rate, self.groups, self.seeds),
        )

    @property
    def scores_mean(self) -> list[float]:
        """Return the mean curve."""
        mean: list[float] = np.mean(self.scores, axis=0).tolist()
        return mean

    @property
    def ends(self) -> Floats:
        """Return where each seed ends: the mean of its last three evaluations, [seeds]."""
        ends: Floats = np.asarray(self.scores, dtype=np.float64)[:, -3:].mean(axis=1)
        return ends

    def groups_to(self, score: float) -> Floats:
        """Return how many groups each seed took to a score, evaluations joined by lines; inf: never."""
        curves = np.asarray(self.scores, dtype=np.float64)  # [seeds, evaluations], the first before any group
        groups = np.full(len(curves), np.inf)
        for seed, curve in enumerate(curves):
            for place in np.flatnonzero(curve >= score)[:1]:
                below, above = curve[max(place - 1, 0)], curve[place]
                part = (score - below) / (above - below) if above > below else 0.0
                groups[seed] = self.groups * max(place - 1 + part, 0) / (curves.shape[1] - 1)
        return groups

    def to_line(self) -> str:
        """Return one line of JSON, without its newline."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of_line(cls, line: str) -> Self:
        """Return what ``to_line`` wrote."""
        fields = json.loads(line)
        return cls(
            **{**fields, "seeds": tuple(fields["seeds"]), "scores": tuple(map(tuple, fields["scores"]))}
        )


def _key(task: str, name: str, learners: int, settings: dict[str, Any], *parts: Any) -> str:
    return json.dumps([task, name, learners, {key: settings[key] for key in _SIMULATED}, *parts])
