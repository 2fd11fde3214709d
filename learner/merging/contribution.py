"""A contribution: what one contributor's steps made of some groups, apart from the change itself."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from pydantic import TypeAdapter

from learner.step_log import TrainedGroup
from learner.step_numbers import StepNumbers


@dataclass(frozen=True, slots=True)
class LocalStep:
    """A step of a contributor, by which it moved."""

    numbers: StepNumbers
    groups: tuple[TrainedGroup, ...]
    kl_nats_of_groups: tuple[float, ...]
    """As ``StepOutcome`` has them, in the groups' order."""


@dataclass(frozen=True, slots=True)
class ContributionReport:
    """The steps of a contribution, and the groups that it consumed."""

    steps: tuple[LocalStep, ...]
    """None: no batch taught anything, and there is no change."""
    uninformative: tuple[TrainedGroup, ...] = ()
    """Groups of batches that taught nothing."""
    not_finite: tuple[TrainedGroup, ...] = ()
    """Groups of batches whose gradient was not finite."""

    @property
    def groups(self) -> Iterator[TrainedGroup]:
        """All groups, in order: those of the steps first."""
        for step in self.steps:
            yield from step.groups
        yield from self.uninformative
        yield from self.not_finite

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, text: bytes) -> "ContributionReport":
        """Read a report. Raises ValueError: it is none."""
        try:
            return _REPORT.validate_python(json.loads(text))  # json's own reader: numbers may be NaN
        except RecursionError as error:
            raise ValueError("a report is nested too deeply") from error


@dataclass(frozen=True, slots=True)
class Contributed:
    """A contribution that was merged: sent again, it is answered as it was."""

    contributor: str
    number: int
    digest: str
    """Hex, of report and payload."""
    version: int = 0
    """The version into which it was merged; 0 in the entry of that version."""


_REPORT: Final = TypeAdapter(ContributionReport)
