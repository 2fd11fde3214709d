"""One line of JSON per gradient step, for plots and for proof that nothing was trained on twice.

A line is written after the step's entry in the journal. A learner killed between the two writes it at its
next start, so that every version has exactly one line.

    steps.jsonl --PART_BYTES--> steps-000000021000.jsonl (up to that version), and a new steps.jsonl

A full part is never written again: it may be compressed or moved away while the learner runs.
"""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import numpy as np

from node import durable
from node.errors import StartupError
from node.rollout import Finish, RolloutGroup
from node.run import StepReport
from node.step_log_parts import part_of, parts_of

PART_BYTES: Final = 64 << 20
"""A part has some 20 000 steps of 32 groups, at 3 kB each; the log's readers hold a line at a time."""

_TAIL_BYTES: Final = 4 << 20
"""More than the longest line: 65 536 groups of 40 bytes."""

_OF_A_ROLLBACK: Final = ("at_s", "restored_version", "groups", "tokens")


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group that a step consumed."""

    group_id: str
    sampler_id: str
    staleness_versions: int


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Lengths and rewards of a batch's completions; fields are named as their metrics."""

    completion_tokens_mean: float
    completion_tokens_p95: float
    """Linearly interpolated."""
    completion_tokens_max: int
    prompt_tokens_mean: float
    """Over groups."""
    cut_ratio: float
    """Share of completions that ended at the token limit."""
    reward_deviation: float
    """Mean over groups of the standard deviation within each (divisor: its size)."""
    zero_advantage_ratio: float
    """Share of groups whose rewards are all equal: they teach nothing."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup]) -> Self:
        """Measure the groups of a batch, at least one."""
        completions = [completion for group in groups for completion in group.completions]
        lengths = np.array([completion.drawn_tokens for completion in completions])
        rewards = [np.array([completion.reward for completion in group.completions]) for group in groups]
        return cls(
            completion_tokens_mean=float(lengths.mean()),
            completion_tokens_p95=float(np.percentile(lengths, 95)),
            completion_tokens_max=int(lengths.max()),
            prompt_tokens_mean=float(np.mean([len(group.prompt_token_ids) for group in groups])),
            cut_ratio=float(np.mean([completion.finish is Finish.LENGTH for completion in completions])),
            reward_deviation=float(np.mean([of_group.std() for of_group in rewards])),
            zero_advantage_ratio=float(np.mean([np.ptp(of_group) == 0 for of_group in rewards])),
        )


@dataclass(frozen=True, slots=True)
class StepLine:
    """The log line of a step."""

    at_s: float
    """Unix seconds on the learner's clock, when the parameters were new."""
    report: StepReport
    tokens: int
    """Completion tokens trained on."""
    groups: tuple[TrainedGroup, ...]
    clamped_tokens: int = 0
    """Tokens whose log ratio was clamped, see ``StepOutcome``."""
    truncated_fraction: float | None = None
    """Share of tokens whose ratio was cut to the objective's ceiling; None: it has none."""
    trust_mean: float | None = None
    """Mean share of the correction for divergence that completions got; None: all of it."""
    learning_rate: float | None = None
    """Rate of the step, by schedule. None: no step was taken."""
    reference_kl_nats: float | None = None
    """KL(learner || base model), mean over tokens; None: not asked for."""
    figures: BatchFigures | None = None
    teaching_groups: int | None = None
    """Groups that taught something. 0: no step was taken, and the version stays. None: not known."""
    groups_wait_s: float | None = None
    """Wait for groups since the step before. As the rest, unknown where the line was written at a start."""
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
    restored_version: int | None = None
    """The version whose weights an operator's rollback restored. It consumed no group, and the report has
    nothing but its number. None: a step made this version."""

    @classmethod
    def of_rollback(cls, version: int, *, restored_version: int, at_s: float, took_s: float) -> Self:
        """Return the line of a rollback that made ``version``."""
        nan = math.nan
        report = StepReport(version, nan, nan, 0, nan, nan, nan, nan, took_s, nan)
        return cls(at_s, report, tokens=0, groups=(), restored_version=restored_version)

    @property
    def is_step(self) -> bool:
        """Whether a step was taken on the batch: it taught something."""
        return self.teaching_groups != 0

    @property
    def version_before(self) -> int:
        """The version that met the batch."""
        return self.report.version - self.is_step

    def to_json(self) -> str:
        """Return one flat object: the fields of report and figures beside the others."""
        fields = dataclasses.asdict(self)
        if self.restored_version is not None:
            shown = {"version": self.report.version, "step_s": self.report.step_s}
            return json.dumps({**shown, **{key: fields[key] for key in _OF_A_ROLLBACK}})
        return json.dumps({**fields.pop("report"), **(fields.pop("figures") or {}), **fields})

    def numbers(self) -> dict[str, float]:
        """Return the step's numbers by the name of their gauge, without ``heterorl_learner_``.

        What is not known has no entry. What graders measured is here as ``grader_<name>``, and has one gauge.
        """
        report, recommended = self.report, self.report.recommended_staleness
        numbers = {
            "reward_mean": report.reward_mean,
            "kl_nats": report.kl_nats,
            "surprisal_nats": report.surprisal_nats,
            "ess_ratio": report.ess_ratio,
            "clip_ratio": report.clip_fraction,
            "gradient_norm": report.gradient_norm,
            "staleness_mean_versions": report.staleness_mean_versions,
            "recommended_staleness_versions": recommended and recommended.versions,
            "tokens_per_second": self.tokens / max(report.step_s, 1e-9),
            "truncated_ratio": self.truncated_fraction,
            "trust_ratio": self.trust_mean,
            "learning_rate": self.learning_rate,
            "reference_kl_nats": self.reference_kl_nats,
            **(dataclasses.asdict(self.figures) if self.figures else {}),
            **{f"grader_{name}": value for name, value in report.grader_metrics.items()},
        }
        return {name: value for name, value in numbers.items() if value is not None}


class StepLog:
    """Appends lines of growing versions to a file, and sets it aside when it is full."""

    def __init__(self, path: Path, *, part_bytes: int = PART_BYTES) -> None:
        self._path = path
        self._part_bytes = part_bytes

    def append(self, line: StepLine) -> None:
        """Write one line; durable on return.

        Raises:
            OSError: the disk is full or failing; the file is as it was.
        """
        if self._path.exists() and self._path.stat().st_size >= self._part_bytes:
            durable.rename(self._path, part_of(self._path, version=_version_of(self._tail())))
        durable.append(self._path, line.to_json().encode() + b"\n")

    def catch_up(self, newest: StepLine | None) -> None:
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
        known = 0 if newest is None else newest.report.version
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
