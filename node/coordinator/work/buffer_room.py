"""How much more may be sampled, and whether a group answers its lease; pure.

The staleness bound is kept by admitting less, not by throwing finished work away: a group is
leased only if the learner will still want it, however slowly it is sampled.
"""

from dataclasses import dataclass

from node.coordinator.work.slots import Slot
from node.errors import RefusedError
from node.rollout import RolloutGroup, SamplingParameters, Verdict, check_group


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits on work in flight, in groups and versions."""

    concurrency_groups: int
    buffer_groups: int
    batch_groups: int
    max_staleness_versions: int


@dataclass(frozen=True, slots=True)
class Load:
    """What is in flight, counted from the ledger."""

    running_groups: int
    """Leased and not submitted."""
    untrained_groups: int
    """Submitted, neither refused nor trained on."""
    trained_groups: int
    version: int
    """The learner's."""
    lost_steps: int = 0
    """Steps whose records were lost; each trained on a batch that is not among ``trained_groups``."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many groups may be leased now, >= 0, and the bound that says so."""

    groups: int
    bound: str
    """concurrency, staleness or buffer; learner or ledger, where the ledger is not known to be whole."""


@dataclass(frozen=True, slots=True)
class Learner:
    """The learner that may publish, and the model it trains: the run's."""

    node_id: str
    epoch: int
    layout_digest: bytes
    tokenizer_digest: bytes
    vocabulary_size: int
    version: int
    """Newest version it is known to have reached."""


@dataclass(frozen=True, slots=True)
class Work:
    """What every lease of the run asks for."""

    run_id: str
    task: str
    group_size: int
    sampling: SamplingParameters


def capacities(bounds: Bounds, load: Load) -> dict[str, int]:
    """Give the room under each bound by name; negative where it is overdrawn.

    staleness: (S + version + 1) * batch - (accepted + running), where accepted counts every
    group ever submitted and not refused. Source: AReaL, arXiv:2505.24298.
    """
    untrained, running = load.untrained_groups, load.running_groups
    accepted = untrained + load.trained_groups + load.lost_steps * bounds.batch_groups
    horizon = bounds.max_staleness_versions + load.version + 1
    return {
        "concurrency": bounds.concurrency_groups - running,
        "staleness": horizon * bounds.batch_groups - (accepted + running),
        "buffer": bounds.buffer_groups - (untrained + running),
    }


def capacity(bounds: Bounds, load: Load) -> Capacity:
    """Give the room under the tightest bound."""
    bound, groups = min(capacities(bounds, load).items(), key=lambda item: item[1])
    return Capacity(max(0, groups), bound)


def objection(group: RolloutGroup, slot: Slot, work: Work, learner: Learner) -> tuple[Verdict, str] | None:
    """Say why a group is not an answer to the lease on ``slot``; None where it is one."""
    try:
        check_group(group, vocabulary_size=learner.vocabulary_size)
    except RefusedError as refused:
        return Verdict.MALFORMED, str(refused)
    if group.layout_digest != learner.layout_digest:
        return Verdict.FOREIGN, _differs("layout digest", group.layout_digest, learner.layout_digest)
    if group.tokenizer_digest != learner.tokenizer_digest:
        return Verdict.FOREIGN, _differs("tokenizer digest", group.tokenizer_digest, learner.tokenizer_digest)
    if (group.task, group.prompt_index) != (work.task, slot.prompt_index):
        return Verdict.FOREIGN, (
            f"it answers prompt {group.prompt_index} of task {group.task!r}, "
            f"leased was prompt {slot.prompt_index} of {work.task!r}"
        )
    if group.sampling != work.sampling:
        return Verdict.FOREIGN, f"it was sampled with {group.sampling}, leased was {work.sampling}"
    if len(group.completions) != work.group_size:
        return Verdict.MALFORMED, f"{len(group.completions)} completions, leased were {work.group_size}"
    longest = max(len(completion.token_ids) for completion in group.completions)
    if longest > work.sampling.max_new_tokens:
        return Verdict.MALFORMED, (
            f"a completion of {longest} tokens, allowed are {work.sampling.max_new_tokens}"
        )
    return None


def _differs(what: str, theirs: bytes, ours: bytes) -> str:
    return f"its {what} is {theirs.hex() or 'empty'}, the run's is {ours.hex()}"
