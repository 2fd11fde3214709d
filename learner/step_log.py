"""``steps.jsonl``: a line of JSON per gradient step, for plots and to show that nothing was trained on twice.

A line is written after the step's entry in the journal. A learner killed between the two writes it at its
next start, so that every version has exactly one line.

    steps.jsonl --PART_BYTES--> steps-000000021000.jsonl (up to that version), and a new steps.jsonl

A full part is never written again: it may be compressed or moved away while the learner runs.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from learner.step_numbers import StepNumbers
from node.errors import StartupError
from node.step_log_parts import part_of, parts_of
from node.system import durable
from node.values.run import RecommendedStaleness, StepReport

PART_BYTES: Final = 64 << 20
"""A part has some 20 000 steps of 32 groups, at 3 kB each; the log's readers hold a line at a time."""

_TAIL_BYTES: Final = 4 << 20
"""More than the longest line: 65 536 groups of 40 bytes."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group that a step consumed."""

    group_id: str
    sampler_id: str
    staleness_versions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """The log line of a step, or of a batch that taught nothing."""

    version: int
    """The version that it made, or that met a batch which taught nothing."""
    at_s: float
    """Unix seconds on the learner's clock, when the parameters were new."""
    step_s: float
    """From batch to new parameters."""
    numbers: StepNumbers
    groups: tuple[TrainedGroup, ...]
    groups_wait_s: float | None = None
    """Wait for groups since the step before."""
    recommended_staleness: RecommendedStaleness | None = None
    """As of this step. None, as the rest where the line was written at a start: not worked out."""
    masters_wait_s: float | None = None
    """The part of ``step_s`` in which the step waited for the publisher to read the version before."""
    journal_s: float | None = None
    """Making the journal's entry durable."""
    published_version: int | None = None
    """Newest version published by then. None: this process has published none."""
    publish_s: float | None = None
    """Time that took, from masters to stored for upload."""
    changed_settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Settings that differ from those of the step before: what each was and is, as JSON has it."""

    @property
    def is_step(self) -> bool:
        """Whether a step was taken on the batch: it taught something."""
        return self.numbers.teaching_groups > 0

    @property
    def version_before(self) -> int:
        """The version that met the batch."""
        return self.version - self.is_step

    @property
    def reward_mean(self) -> float:
        """Mean reward of the batch."""
        return self.numbers.batch.reward_mean

    def to_json(self) -> str:
        """Return one flat object: the numbers beside the other fields."""
        told = dataclasses.asdict(self)
        del told["numbers"]
        return json.dumps({**self.numbers.flat(), **told})

    def gauges(self) -> dict[str, float]:
        """Return what is known of the step by the name of its gauge, without ``heterorl_learner_``."""
        gauges = self.numbers.gauges() | {"tokens_per_second": self.numbers.tokens / max(self.step_s, 1e-9)}
        if self.recommended_staleness is not None and self.recommended_staleness.versions is not None:
            gauges["recommended_staleness_versions"] = self.recommended_staleness.versions
        return gauges

    def report(self) -> StepReport:
        """Return what the coordinator is told of the step: the numbers that a report has fields for."""
        own = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        told = {**self.numbers.flat(), **own}
        return StepReport(**{one.name: told[one.name] for one in dataclasses.fields(StepReport)})


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackLine:
    """The log line of an operator's rollback, which consumed no group."""

    version: int
    """The version that it made."""
    at_s: float
    """As of a step, and so is ``step_s``."""
    step_s: float
    restored_version: int
    """The version whose weights it has."""

    def to_json(self) -> str:
        """Return one flat object, with the keys of a step that counts add up."""
        return json.dumps({**dataclasses.asdict(self), "groups": [], "tokens": 0})


class StepLog:
    """Appends lines of growing versions to a file, and sets it aside when it is full."""

    def __init__(self, path: Path, *, part_bytes: int = PART_BYTES) -> None:
        self._path = path
        self._part_bytes = part_bytes

    def append(self, line: StepLine | RollbackLine) -> None:
        """Write one line; durable on return.

        Raises:
            OSError: the disk is full or failing; the file is as it was.
        """
        if self._path.exists() and self._path.stat().st_size >= self._part_bytes:
            durable.rename(self._path, part_of(self._path, version=_version_of(self._tail())))
        durable.append(self._path, line.to_json().encode() + b"\n")

    def catch_up(self, newest: StepLine | RollbackLine | None) -> None:
        """Repair the end of the file after a kill: drop half a line, add the newest if it is missing.

        Raises:
            StartupError: the file has a step that the journal lacks.
        """
        self._path.touch()
        with self._path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, end - _TAIL_BYTES))
            whole, newline, _ = file.read().rpartition(b"\n")
            file.truncate(start + len(whole) + len(newline))
        logged = _version_of(whole)
        if not logged and (parts := parts_of(self._path)):
            logged = parts[-1].version  # killed between the renaming and the next line
        known = 0 if newest is None else newest.version
        if logged > known:
            raise StartupError(
                f"{self._path} has step {logged}, the last intact entry of the journal beside it is of step "
                f"{known}: entries are damaged or missing",
                fix="Restore the learner's state directory from a copy: others were told of that step.",
            )
        if newest is not None and logged < known:
            self.append(newest)

    def _tail(self) -> bytes:
        with self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read()


def _version_of(lines: bytes) -> int:
    """Return the version of the last of whole lines; 0: there is none."""
    last = lines.rstrip(b"\n").rpartition(b"\n")[2]
    return int(json.loads(last)["version"]) if last else 0
