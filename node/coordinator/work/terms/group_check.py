"""Whether a group answers its lease; pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from node.coordinator.work.slots.slot import Slot
from node.coordinator.work.terms.model_check import Learner, check_model
from node.coordinator.work.terms.run_terms import Work
from node.errors import Reason, RefusedError
from node.values.fact import Fact
from node.values.groups.rollout import GroupHeader, other_options
from node.values.groups.verdict import Verdict
from node.values.groups.well_formed import check_header


@dataclass(frozen=True, slots=True)
class NotedOptions(Fact):
    """The task and the options by which the groups of the ledger were graded."""

    kind: ClassVar[str] = "task_options"

    digest: bytes


def objection(
    header: GroupHeader,
    slot: Slot,
    work: Work,
    learner: Learner,
    has_been_made: Callable[[int], bool],
    *,
    is_confirmed: bool,
) -> tuple[Verdict, str] | None:
    """Return why a group does not answer the lease on ``slot``; None where it does.

    Args:
        is_confirmed: Whether the learner has said, since this process began, which versions it has made.
    Raises:
        RefusedError: BUSY; it names a version that only the learner can know of, who has not said yet.
    """
    try:
        check_header(header, is_graded=not work.verifiers_grade)
        check_model(header.layout_digest, header.tokenizer_digest, learner, of="the group")
    except RefusedError as refused:
        is_other_model = refused.reason in (Reason.LAYOUT_MISMATCH, Reason.TOKENIZER_MISMATCH)
        return Verdict.FOREIGN if is_other_model else Verdict.MALFORMED, refused.what
    if (header.task, header.prompt_index) != (work.task, slot.prompt_index):
        return Verdict.FOREIGN, (
            f"it answers prompt {header.prompt_index} of task {header.task!r}, "
            f"leased was prompt {slot.prompt_index} of {work.task!r}"
        )
    if what := other_options(header, work.task_digest) or work.objection_to_grader(header.grader_digest):
        return Verdict.FOREIGN, what
    if header.sampling != work.sampling:
        return Verdict.FOREIGN, f"it was sampled with {header.sampling}, leased was {work.sampling}"
    if header.completions != work.group_size:
        return Verdict.MALFORMED, f"{header.completions} completions, leased were {work.group_size}"
    if header.prompt_tokens > work.prompt_tokens:
        return (
            Verdict.MALFORMED,
            f"a prompt of {header.prompt_tokens} tokens, allowed are {work.prompt_tokens}",
        )
    longest, allowed = header.longest_completion, work.sampling.max_new_tokens
    if not 1 <= longest <= allowed:
        return Verdict.MALFORMED, f"a completion of {longest} tokens, allowed are {allowed}"
    together = header.prompt_tokens + longest
    if learner.context_tokens and together > learner.context_tokens:
        return Verdict.MALFORMED, (
            f"prompt and completion have {together} tokens, the run's model takes {learner.context_tokens}"
        )
    for version in sorted({header.oldest_version, header.newest_version}):
        if version < 0:
            return Verdict.MALFORMED, f"it names version {version}; the oldest there is, is 0"
        if has_been_made(version):
            continue
        if not is_confirmed:
            what = f"whether there is a version {version} is not known here before the learner is back"
            raise RefusedError(Reason.BUSY, what, fix="send the group again later")
        return Verdict.FOREIGN, f"there is no version {version}, the learner is at {learner.version}"
    return None
