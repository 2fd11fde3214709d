"""A contribution as it was handed in, read, and as the learner's journal keeps it.

header    a line of JSON: contributor, number, base_version, tokens | the report, as it came
columns   payload
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

from learner.merging.contribution import Contributed, ContributionReport, LocalStep
from learner.merging.formulas.outer_step import Worked
from learner.step_numbers import BatchFigures, StepNumbers
from node.values.contribution import Contribution
from node.values.groups.rollout import EncodedGroup, RolloutGroup

MOST_POSITIONS: Final = 1 << 40
"""More than any step reads."""

_ROUNDING: Final = 1e-3

_MEANS: Final = (
    "gradient_norm",
    "learning_rate",
    "kl_nats",
    "reference_kl_nats",
    "surprisal_nats",
    "clip_fraction",
    "truncated_fraction",
)

_COUNTS: Final = frozenset({"teaching_groups", "tokens", "clamped_tokens", "read_tokens", "distinct_tokens"})


@dataclass(frozen=True, slots=True, eq=False)
class HandedIn:
    """A contribution with its sender and what its report says."""

    contributor: str
    contribution: Contribution
    report: ContributionReport
    tokens: int = 0
    """Drawn tokens of the groups of its steps, as the learner counts them; 0: it has not yet."""
    disputed: frozenset[str] = frozenset()
    """Groups that taught it nothing, by its word alone: see ``CheckedContribution``."""

    @property
    def group_ids(self) -> tuple[str, ...]:
        """All groups that it consumed."""
        return tuple(group.group_id for group in self.report.groups)

    @property
    def worked(self) -> Worked:
        """The work behind it, for its weight."""
        trained = sum(len(step.groups) for step in self.report.steps)
        return Worked(trained, self.tokens, groups=len(self.group_ids))

    def counted(self, groups: Mapping[str, RolloutGroup]) -> Self:
        """Return it with its tokens counted in its groups, which are given as they were dealt."""
        return replace(self, tokens=sum(_drawn(step, groups) for step in self.report.steps))

    @property
    def contributed(self) -> Contributed:
        """Its part of the progress, once it is merged."""
        return Contributed(self.contributor, self.contribution.number, self.contribution.digest.hex())

    @classmethod
    def of(cls, contributor: str, contribution: Contribution) -> Self:
        """Read what a contributor has sent; hashes it. Raises ValueError: it is not what it says."""
        one = contribution
        if one.digest != Contribution.of(one.number, one.base_version, one.report, one.payload).digest:
            raise ValueError("report and payload do not have the digest that its header says")
        report = ContributionReport.of_json(one.report)
        if bool(report.steps) != bool(one.payload):
            raise ValueError("a change without steps, or steps without a change")
        return cls(contributor, one, report)

    def journalled(self) -> EncodedGroup:
        """Return it as a row of the journal."""
        one = self.contribution
        about = {"contributor": self.contributor, "number": one.number, "base_version": one.base_version}
        return EncodedGroup(
            json.dumps(about | {"tokens": self.tokens}).encode() + b"\n" + one.report, one.payload
        )

    @classmethod
    def of_journal(cls, row: EncodedGroup) -> Self:
        """Read a row. Raises ValueError: it is no contribution."""
        about, _, report = row.header.partition(b"\n")
        told = json.loads(about)
        one = Contribution.of(told["number"], told["base_version"], report, row.columns)
        return cls(told["contributor"], one, ContributionReport.of_json(report), told["tokens"])


def report_objection(one: HandedIn, groups: Mapping[str, RolloutGroup], *, version: int) -> str:
    """Return why a report cannot be true; empty: it can.

    Args:
        groups: all of the contribution's, as they were dealt.
        version: the newest.
    """
    if not 0 <= one.contribution.base_version <= version:
        return f"its steps began from version {one.contribution.base_version}, the newest is {version}"
    for step in one.report.steps:
        numbers, kl_nats = step.numbers, step.kl_nats_of_groups
        if not step.groups or len(kl_nats) != len(step.groups):
            return f"a step with {len(step.groups)} groups and {len(kl_nats)} divergences"
        drawn = _drawn(step, groups)
        if not 0 < numbers.tokens <= drawn or not 0 < numbers.teaching_groups <= len(step.groups):
            return (
                f"a step on {numbers.tokens} tokens of {drawn}, which {numbers.teaching_groups} of "
                f"{len(step.groups)} groups taught"
            )
        if not 0 <= numbers.clamped_tokens <= drawn:
            return f"a step that clamped {numbers.clamped_tokens} tokens of {drawn}"
        positions = (numbers.read_tokens, numbers.distinct_tokens)
        if not all(one is None or 0 <= one <= MOST_POSITIONS for one in positions):
            return f"a step that read more than {MOST_POSITIONS} positions, or fewer than none"
        told = [getattr(numbers, name) for name in _MEANS]
        if not all(one is None or math.isfinite(one) for one in (*told, *kl_nats)):
            return "a step whose numbers are not finite"
        if not (math.isnan(numbers.ess_ratio) or 0 <= numbers.ess_ratio <= 1 + _ROUNDING):
            return f"a step whose effective sample size is {numbers.ess_ratio:g} of its size"
    return ""


def _drawn(step: LocalStep, groups: Mapping[str, RolloutGroup]) -> int:
    completions = (one for group in step.groups for one in groups[group.group_id].completions)
    return sum(completion.drawn_tokens for completion in completions)


def merged_numbers(steps: Sequence[LocalStep], batch: BatchFigures) -> StepNumbers:
    """Return the numbers of several steps as those of one: sums of counts, means over tokens of the rest.

    Args:
        steps: at least one, which trained on a token.
        batch: of all their groups.
    """
    told = [step.numbers for step in steps]
    tokens = sum(one.tokens for one in told)

    def merged(name: str) -> Any:
        values = [getattr(one, name) for one in told]
        if None in values:
            return None
        if name in _COUNTS:
            return sum(values)
        return sum(value * one.tokens for value, one in zip(values, told, strict=True)) / tokens

    names = [one.name for one in fields(StepNumbers) if one.name != "batch"]
    return StepNumbers(batch=batch, **{name: merged(name) for name in names})
