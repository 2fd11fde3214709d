"""What the coordinator decides about work: each decision is an answer and a transaction; pure.

``node.coordinator.transactions`` puts the transaction on disk, applies it to the accounts, and only then
returns the answer. A decision that raises has changed nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from node.coordinator.work.accounts import Accounts, StoredGroup, Transaction
from node.coordinator.work.capacity import Bounds, Capacity, capacity
from node.coordinator.work.evaluation.evaluations import EvaluationChange, is_evaluation_lease, lease_id_of
from node.coordinator.work.group_check import Work, objection
from node.coordinator.work.leases import Standing
from node.coordinator.work.slots import Slot, SlotState, group_id, parse_group_id
from node.coordinator.work.task_size import agreed_size
from node.errors import Reason, RefusedError
from node.limits import LEASES_PER_PEER
from node.policy import PolicyVersion
from node.rollout import GroupVerdict, LeaseGrant, LeasePurpose, PromptLease, RolloutGroup, Verdict

Answer = TypeVar("Answer")

NOTHING: Final = Transaction()

LEARNER_PAUSE_S: Final = 2.0
"""Until a sampler asks again while every lease waits for the learner or the ledger."""

EMPTY_PAUSE_S: Final = 1.0
"""Until a sampler asks again that was granted nothing."""

TOO_OLD: Final = "policy version"
"""The bound that a sampler reaches whose policy is older than the staleness bound."""

PARTIAL_PAUSE_S: Final = 0.5
"""Until a sampler asks again that was granted less than it asked for."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[Answer]):
    """An answer, and what must be on disk before it is given."""

    answer: Answer
    transaction: Transaction = NOTHING


@dataclass(frozen=True, slots=True)
class Submitted:
    """An answer to a submission."""

    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """Whose group a verdict is about."""

    sampler_id: str
    spooled_at_s: float | None
    """Unix seconds; None where the group was judged before."""


def lease(
    accounts: Accounts,
    work: Work,
    bounds: Bounds,
    *,
    sampler_id: str,
    wanted: int,
    held: PolicyVersion | None,
    ttl_s: float,
    now: float,
) -> Decision[LeaseGrant]:
    """Grant as many of ``wanted`` leases as every bound allows.

    Nothing is leased before the learner has confirmed that the ledger lacks nothing: an older ledger would
    lease slots again that were trained on. A sampler whose policy is older than the staleness bound gets
    nothing: what it began now would be stale when done, and one that is behind gets as much less as it is
    behind. Held-out prompts come first and on top of the bounds, up to their share of the sampler's leases,
    and go to samplers at the version under evaluation, however old it is by now; which slots are leased does
    not depend on them.
    """
    learner, unconfirmed = accounts.learner, _unconfirmed(accounts)
    if learner is None or unconfirmed:
        return Decision(LeaseGrant((), LEARNER_PAUSE_S, unconfirmed))
    if held is None:
        return Decision(LeaseGrant((), EMPTY_PAUSE_S, TOO_OLD))
    if held.number < learner.version - bounds.max_staleness_versions:
        free = Capacity(0, TOO_OLD)
    else:
        free = room(accounts, bounds, now=now, behind_versions=max(0, learner.version - held.number))
    training = sum(
        slot.lease is not None and slot.lease.holder == sampler_id
        for slot in accounts.slots.open_slots.values()
    )
    running = training + accounts.evaluations.running(sampler_id)
    unused = min(wanted, LEASES_PER_PEER - running)
    held_out = accounts.evaluations.grant(
        sampler_id, unused, held_version=held.number, running=running, now=now
    )
    evaluating = _evaluation_leases(accounts, work, held_out, ttl_s=ttl_s)
    granted = min(unused - len(evaluating), free.groups)
    slots = accounts.slots.grant(
        sampler_id,
        granted,
        now=now,
        is_aside=lambda prompt_index: accounts.bad_prompts.is_aside(prompt_index, now=now),
    )
    leased = [slot for slot in slots if slot.state is SlotState.LEASED]
    leases = (
        *evaluating,
        *(_lease(group_id(slot.number, slot.granted), slot, work, ttl_s=ttl_s) for slot in leased),
    )
    transaction = Transaction(slots=slots, evaluation=held_out)
    evaluate_from = accounts.evaluations.from_version
    if len(leases) == wanted:
        return Decision(LeaseGrant(leases, 0.0, "", evaluate_from), transaction)
    bound = free.bound if len(leased) == granted else "prompts"
    pause_s = PARTIAL_PAUSE_S if leases else EMPTY_PAUSE_S
    return Decision(LeaseGrant(leases, pause_s, bound, evaluate_from), transaction)


def _evaluation_leases(
    accounts: Accounts, work: Work, granted: EvaluationChange | None, *, ttl_s: float
) -> tuple[PromptLease, ...]:
    if granted is None or granted.evaluation is None:
        return ()
    version, asked = granted.evaluation.version, accounts.evaluations.work(work)
    leases = (_lease(lease_id_of(version, slot), slot, asked, ttl_s=ttl_s) for slot in granted.slots)
    return tuple(replace(lease, purpose=LeasePurpose.EVALUATION, policy_version=version) for lease in leases)


def _lease(lease_id: str, slot: Slot, work: Work, *, ttl_s: float) -> PromptLease:
    return PromptLease(lease_id, work.task, slot.prompt_index, work.group_size, work.sampling, ttl_s)


def room(accounts: Accounts, bounds: Bounds, *, now: float, behind_versions: int = 0) -> Capacity:
    """Return how many groups may be leased now, to a sampler so far behind the learner."""
    if waits_for := _unconfirmed(accounts):
        return Capacity(0, waits_for)
    prompts = accounts.slots.prompts
    if prompts is None:
        return Capacity(0, "task")
    if accounts.bad_prompts.are_all_aside(prompts, now=now):
        return Capacity(0, "prompts")
    return capacity(bounds, accounts.load(), behind_versions=behind_versions)


def _unconfirmed(accounts: Accounts) -> str:
    """Return what every lease waits for before the ledger is known to be whole; empty: it is."""
    if accounts.gap:
        return "ledger"
    return "" if accounts.is_confirmed and accounts.learner is not None else "learner"


def submission(
    accounts: Accounts,
    work: Work,
    *,
    sampler_id: str,
    name: str,
    group: RolloutGroup | RefusedError,
    data: bytes,
    is_published: Callable[[int], bool],
    buffer_groups: int,
    now: float,
) -> Decision[Submitted]:
    """Decide what becomes of a group that a sampler submits under the id ``name``.

    Args:
        group: As decoded, or why it could not be.
        data: The message as it came, to be stored.
        is_published: Whether a policy version was ever announced.

    Raises:
        RefusedError: BUSY; the spool is full.
    """

    def say(
        verdict: Verdict, detail: str = "", *, slot: Slot | None = None, stored: StoredGroup | None = None
    ) -> Decision[Submitted]:
        slots = () if slot is None else (slot,)
        answered = (each.prompt_index for each in slots if stored is not None)
        transaction = Transaction(
            slots=slots,
            stored=stored,
            verdicts=((sampler_id, verdict),),
            lifted_prompts=tuple(index for index in answered if index in accounts.bad_prompts),
        )
        return Decision(Submitted(verdict, detail), transaction)

    if is_evaluation_lease(name):
        return _evaluated(
            accounts,
            work,
            sampler_id=sampler_id,
            name=name,
            group=group,
            is_published=is_published,
            now=now,
        )
    parsed = parse_group_id(name)
    if parsed is None:
        return say(Verdict.MALFORMED, f"{name[:100]!r} is no group id")
    if isinstance(group, RolloutGroup) and group.run_id != work.run_id:
        return say(Verdict.FOREIGN, f"it is of run {group.run_id[:100]!r}, this is {work.run_id!r}")
    match accounts.slots.standing(*parsed, sampler_id):
        case Standing.NEVER_GRANTED:
            return say(Verdict.FOREIGN, f"lease {name} is not {sampler_id}'s")
        case Standing.DUPLICATE:
            return say(Verdict.DUPLICATE, f"slot {parsed[0]} has its group already")
        case Standing.LOST:
            return say(Verdict.FOREIGN, f"slot {parsed[0]} was leased in a time that the ledger has lost")
    learner = accounts.learner
    if learner is None:
        raise RefusedError(Reason.BUSY, "no learner has joined yet", fix="send it again later")
    if accounts.gap:
        raise RefusedError(Reason.BUSY, f"the ledger is behind: {accounts.gap}", fix="send it again later")
    if isinstance(group, RefusedError):
        problem: tuple[Verdict, str] | None = (Verdict.MALFORMED, str(group))
    else:
        problem = objection(group, accounts.slots.open_slots[parsed[0]], work, learner, is_published)
    if problem is not None:
        return say(*problem, slot=accounts.slots.spent(*parsed))
    if accounts.load().untrained_groups >= buffer_groups:
        raise RefusedError(Reason.BUSY, f"the spool has {buffer_groups} groups", fix="send it again later")
    stored = StoredGroup(*parsed, sampler_id, now, data)
    return say(Verdict.SPOOLED, slot=accounts.slots.submitted(*parsed), stored=stored)


def _evaluated(
    accounts: Accounts,
    work: Work,
    *,
    sampler_id: str,
    name: str,
    group: RolloutGroup | RefusedError,
    is_published: Callable[[int], bool],
    now: float,
) -> Decision[Submitted]:
    """Count the group of a held-out prompt; it is not stored, and its verdict is not one of training."""
    evaluations, learner = accounts.evaluations, accounts.learner
    evaluation = evaluations.under_way
    standing = evaluations.standing(name, sampler_id)
    if standing is Standing.DUPLICATE:
        return Decision(Submitted(Verdict.DUPLICATE, f"the prompt of lease {name} has its answer already"))
    if standing is not Standing.WANTED or evaluation is None:
        return Decision(Submitted(Verdict.FOREIGN, f"lease {name} is not {sampler_id}'s"))
    if learner is None:
        raise RefusedError(Reason.BUSY, "no learner has joined yet", fix="send it again later")
    if isinstance(group, RefusedError):
        problem: tuple[Verdict, str] | None = (Verdict.MALFORMED, str(group))
    elif group.run_id != work.run_id:
        problem = (Verdict.FOREIGN, f"it is of run {group.run_id[:100]!r}, this is {work.run_id!r}")
    else:
        problem = objection(group, evaluations.slot(name), evaluations.work(work), learner, is_published)
        drawn_by = {group.oldest_version, group.newest_version}
        if problem is None and drawn_by != {evaluation.version}:
            other = next(iter(drawn_by - {evaluation.version}))
            detail = f"version {other} drew a token, evaluated is {evaluation.version}"
            problem = (Verdict.STALE, f"{detail}: stay at it until the prompt is generated")
    if problem is not None:
        return Decision(Submitted(*problem), Transaction(evaluation=evaluations.spent(name, now=now)))
    assert isinstance(group, RolloutGroup)
    counted = evaluations.counted(name, sampler_id, group, now=now)
    return Decision(Submitted(Verdict.SPOOLED), Transaction(evaluation=counted))


def evaluation_begins(accounts: Accounts, held: PolicyVersion, *, now: float) -> Decision[None]:
    """Begin the evaluation that is due with the version that a sampler holds."""
    is_known = held.number == 0 or held.number in accounts.versions
    if accounts.slots.prompts is None or _unconfirmed(accounts) or not is_known:
        return Decision(None)
    change = accounts.evaluations.begun(held.number, first_prompt=accounts.slots.prompts, now=now)
    return Decision(None, Transaction(evaluation=change))


def evaluation_ends(accounts: Accounts, *, now: float) -> Decision[None]:
    """End an evaluation that nobody is left to answer, or whose terms are configured otherwise."""
    if accounts.slots.prompts is None:
        return Decision(None)
    change = accounts.evaluations.ended(first_prompt=accounts.slots.prompts, now=now)
    return Decision(None, Transaction(evaluation=change))


def sampler_joins(
    accounts: Accounts, *, sampler_id: str, task: str, configured: int | None, prompts: int
) -> Decision[None]:
    """Admit a sampler that found ``prompts`` prompts in the run's task; 0: it does not know yet.

    Raises:
        RefusedError: TASK_MISMATCH.
    """
    if not prompts:
        return Decision(None)
    size = agreed_size(
        accounts.task,
        task=task,
        configured=configured,
        prompts=prompts,
        held_out=accounts.evaluations.held_out_prompts,
        sampler_id=sampler_id,
    )
    if size is None:
        return Decision(None)
    # Where the task is another one, so are its prompts.
    lifted = tuple(bad.prompt_index for bad in accounts.bad_prompts.newest(len(accounts.bad_prompts)))
    return Decision(None, Transaction(task=size, lifted_prompts=lifted))


def judgement(accounts: Accounts, judged: GroupVerdict) -> Decision[Judged | None]:
    """Decide what the learner's verdict on a group changes; None: nothing.

    DUPLICATE means that the learner has trained on the group before and the ledger does not know of it: the
    slot is lost, and neither delivered nor leased again.

    Raises:
        RefusedError: MALFORMED; the verdict is not the learner's to give.
    """
    parsed = parse_group_id(judged.group_id)
    if parsed is None or judged.verdict in (Verdict.SPOOLED, Verdict.TRAINED):
        raise RefusedError(
            Reason.MALFORMED,
            f"the learner cannot give group {judged.group_id[:100]!r} the verdict {judged.verdict}",
        )
    before = accounts.slots.open_slots.get(parsed[0])
    match judged.verdict:
        case Verdict.ACCEPTED:
            slot = accounts.slots.accepted(*parsed)
        case Verdict.DUPLICATE:
            slot = accounts.slots.lost(*parsed)
        case _:
            slot = accounts.slots.refused(*parsed)
    attempt = slot.attempt(parsed[1]) if slot is not None else None
    if before is None or slot is None or attempt is None:
        return Decision(None)
    is_first = before.state is SlotState.SPOOLED
    answer = Judged(attempt.holder, accounts.spooled_at_s.get(slot.number) if is_first else None)
    return Decision(answer, Transaction(slots=(slot,), verdicts=((attempt.holder, judged.verdict),)))


def expiry(accounts: Accounts, now: float) -> Decision[int]:
    """End the leases whose time is up; the answer is how many."""
    slots = accounts.slots.expire(now)
    bad = accounts.bad_prompts.entries(slots, details={}, now=now)
    evaluation = accounts.evaluations.expire(now)
    expired = len(slots) + (0 if evaluation is None else evaluation.leases)
    return Decision(expired, Transaction(slots=slots, bad_prompts=bad, evaluation=evaluation))
