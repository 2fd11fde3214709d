"""A contribution as it was handed in, and as the learner's journal keeps it.

header    a line of JSON: contributor, number, base_version, tokens | the report, as it came
columns   payload
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import blake3

from learner.merging.contribution import Contributed, ContributionReport, LocalStep
from learner.merging.formulas.outer_step import Worked
from learner.step_numbers import BatchFigures, StepNumbers
from node.values.groups.rollout import EncodedGroup, RolloutGroup
from node.values.merging import ContributionHead

DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class HandedIn:
    """One contribution, whole."""

    contributor: str
    number: int
    base_version: int
    """The merged version that its steps began from."""
    report: ContributionReport
    report_json: bytes
    """As it came."""
    payload: bytes
    """Empty: its groups taught nothing, and there is no change."""
    digest: bytes
    """A digest of report and payload; see ``digest_of``."""
    tokens: int = 0
    """Drawn tokens of the groups of its steps, as the learner counts them; 0: it has not yet."""

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
        return Contributed(self.contributor, self.number, self.digest.hex())

    def journalled(self) -> EncodedGroup:
        """Return it as a row of the journal."""
        about = {name: getattr(self, name) for name in ("contributor", "number", "base_version", "tokens")}
        return EncodedGroup(json.dumps(about).encode() + b"\n" + self.report_json, self.payload)

    @classmethod
    def of_journal(cls, row: EncodedGroup) -> Self:
        """Read a row. Raises ValueError: it is no contribution."""
        about, _, report = row.header.partition(b"\n")
        told = json.loads(about)
        digest = payload_digest(row.columns)
        head = ContributionHead(told["number"], told["base_version"], report, len(row.columns), digest)
        return replace(cls.of(told["contributor"], head, row.columns), tokens=told["tokens"])

    @classmethod
    def of(cls, contributor: str, header: ContributionHead, payload: bytes) -> Self:
        """Read what a contributor has sent.

        Raises:
            ValueError: the report is none, or the payload is not the header's.
        """
        if len(payload) != header.payload_bytes or payload_digest(payload) != header.payload_digest:
            raise ValueError("the payload is not what its header says")
        report = ContributionReport.of_json(header.report)
        if bool(report.steps) != bool(payload):
            raise ValueError("a change without steps, or steps without a change")
        number, base_version = header.number, header.base_version
        return cls(contributor, number, base_version, report, header.report, payload, digest_of(header))


def payload_digest(payload: bytes) -> bytes:
    """Return BLAKE3 of a payload, as its header has it."""
    return blake3.blake3(payload).digest(length=DIGEST_BYTES)


def digest_of(header: ContributionHead) -> bytes:
    """Return a digest of report and payload: of the groups of a contribution, and of its change."""
    return payload_digest(header.payload_digest + header.report)


def report_objection(one: HandedIn, groups: Mapping[str, RolloutGroup], *, version: int) -> str:
    """Return why a report cannot be true; empty: it can.

    Args:
        groups: all of the contribution's, as they were dealt.
        version: the newest.
    """
    if not 0 <= one.base_version <= version:
        return f"its steps began from version {one.base_version}, the newest is {version}"
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
        if not all(
            map(math.isfinite, (*kl_nats, numbers.gradient_norm, numbers.kl_nats, numbers.surprisal_nats))
        ):
            return "a step whose numbers are not finite"
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

    def mean(name: str) -> float:
        return float(sum(getattr(one, name) * one.tokens for one in told) / tokens)

    def mean_if_known(name: str) -> float | None:
        return None if any(getattr(one, name) is None for one in told) else mean(name)

    return StepNumbers(
        batch=batch,
        teaching_groups=sum(one.teaching_groups for one in told),
        tokens=tokens,
        gradient_norm=mean("gradient_norm"),
        learning_rate=mean("learning_rate"),
        kl_nats=mean("kl_nats"),
        reference_kl_nats=mean_if_known("reference_kl_nats"),
        surprisal_nats=mean("surprisal_nats"),
        ess_ratio=mean("ess_ratio"),
        clip_fraction=mean("clip_fraction"),
        truncated_fraction=mean_if_known("truncated_fraction"),
        clamped_tokens=sum(one.clamped_tokens for one in told),
    )
