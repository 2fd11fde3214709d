"""What the coordinator decides about work: each decision is an answer and a transaction; pure.

``node.coordinator.transactions`` puts the transaction on disk, applies it to the accounts, and only then
returns the answer. A decision that raises has changed nothing.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from node.coordinator.work.accounts import Accounts, StoredGroup, Transaction
from node.coordinator.work.bad_prompts import Report
from node.coordinator.work.capacity import Bounds, Capacity, capacity, is_full
from node.coordinator.work.evaluation.evaluations import EvaluationChange, is_evaluation_lease, lease_id_of
from node.coordinator.work.group_check import Work, objection
from node.coordinator.work.leases import Claim
from node.coordinator.work.model_check import Learner, check_base
from node.coordinator.work.prompt_agreement import Dissent, PromptSaid
from node.coordinator.work.slots import Slot, SlotState, group_id, parse_group_id
from node.coordinator.work.task_size import agreed_size
from node.errors import Reason, RefusedError
from node.failure import Failure
from node.policy import BaseModel, PolicyVersion
from node.rollout import (
    EncodedGroup,
    GroupHeader,
    GroupVerdict,
    LeaseGrant,
    LeasePurpose,
    PromptLease,
    RolloutGroup,
    Verdict,
    check_group,
    other_options,
)
from node.weights.planning.cheapest_chain import PUBLIC_VERSION

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


_FAULTY: Final = frozenset({Verdict.SUSPECT, Verdict.FOREIGN, Verdict.MALFORMED})
"""Verdicts of the learner that are held against a sampler; one that is far away may be stale through no
fault."""


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
    has_dissent: bool = False
    """Whether other samplers say that the prompt has other tokens."""


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
    lease slots again that were trained on. Nothing is leased for another version 0 than the learner's: a
    sampler that joined before the learner is checked here first. A sampler whose policy is older than the
    staleness bound gets nothing: what it began now would be stale when done, and one that is behind gets as
    much less as it is behind. Nobody gets more than its share (see ``standing``). Held-out prompts come first
    and on top of bounds and share, up to their part of what the sampler may hold by its deliveries.
    They go to samplers at the version under evaluation, however old it is by now; which slots are leased does
    not depend on them.

    Raises:
        RefusedError: BASE_MISMATCH.
    """
    learner, unconfirmed = accounts.learner, _unconfirmed(accounts)
    if learner is None or unconfirmed:
        return Decision(LeaseGrant((), LEARNER_PAUSE_S, unconfirmed))
    if held is None:
        return Decision(LeaseGrant((), EMPTY_PAUSE_S, TOO_OLD))
    if held.number == PUBLIC_VERSION:
        check_base(BaseModel(held.root), learner)
    if held.number < learner.version - bounds.max_staleness_versions:
        free = Capacity(0, TOO_OLD)
    else:
        free = room(accounts, bounds, behind_versions=max(0, learner.version - held.number))
    share = accounts.share(sampler_id, free=free.groups, now=now)
    running = accounts.held(sampler_id)
    unused = max(0, min(wanted, share.leases - running))
    held_out = None
    if share.allowance:  # samplers that are not believed are asked for training alone
        allowed = max(0, min(wanted, share.allowance - running))
        held_out = accounts.evaluations.grant(
            sampler_id, allowed, held_version=held.number, running=running, now=now
        )
    evaluating = _evaluation_leases(accounts, work, held_out, ttl_s=ttl_s)
    granted = max(0, min(unused - len(evaluating), free.groups))
    slots = accounts.slots.grant(
        sampler_id,
        granted,
        now=now,
        aside=lambda prompt_index: accounts.bad_prompts.aside(prompt_index, sampler_id, now=now),
    )
    leased = [slot for slot in slots if slot.state is SlotState.LEASED]
    leases = (
        *evaluating,
        *(_lease(group_id(slot.number, slot.granted), slot, work, ttl_s=ttl_s) for slot in leased),
    )
    standing = accounts.standings.of(sampler_id)
    begun = standing.granted(len(leases), free=running + free.groups, now=now)
    transaction = Transaction(
        slots=slots, evaluation=held_out, standings=() if begun == standing else (begun,)
    )
    evaluate_from = accounts.evaluations.from_version
    if len(leases) == wanted:
        return Decision(LeaseGrant(leases, 0.0, "", evaluate_from), transaction)
    if len(leased) < granted:
        bound = "prompts"
    else:
        bound = share.bound if unused < wanted and granted < free.groups else free.bound
    pause_s = PARTIAL_PAUSE_S if leases else max(EMPTY_PAUSE_S, share.pause_s)
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
    return PromptLease(
        lease_id,
        work.task,
        slot.prompt_index,
        work.group_size,
        work.sampling,
        ttl_s,
        task_digest=work.task_digest,
    )


def room(accounts: Accounts, bounds: Bounds, *, behind_versions: int = 0) -> Capacity:
    """Return how many groups may be leased, to a sampler so far behind the learner."""
    if waits_for := _unconfirmed(accounts):
        return Capacity(0, waits_for)
    if accounts.slots.prompts is None:
        return Capacity(0, "task")
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
    group: GroupHeader | RolloutGroup | RefusedError,
    encoded: EncodedGroup,
    is_published: Callable[[int], bool],
    bounds: Bounds,
    now: float,
) -> Decision[Submitted]:
    """Decide what becomes of a group that a sampler submits under the id ``name``.

    A verdict is written down where it changes the slot of a lease that the sampler holds. Repeats, and what
    no lease asked for, are answered only: they must not cost a write to disk each.

    Args:
        group: Its header, or all of it where the prompt is held out; or why it could not be decoded.
        encoded: As it came, to be stored.
        is_published: Whether a policy version was ever announced.

    Raises:
        RefusedError: BUSY; the spool is full.
    """

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
        return _answer(Verdict.MALFORMED, f"{name[:100]!r} is not a group id; expected <slot>.<attempt>")
    if isinstance(group, RolloutGroup):
        group = group.header
    if isinstance(group, GroupHeader) and group.run_id != work.run_id:
        return _answer(Verdict.FOREIGN, f"it is of run {group.run_id[:100]!r}, this is {work.run_id!r}")
    match accounts.slots.claim(*parsed, sampler_id):
        case Claim.NEVER_GRANTED:
            return _answer(Verdict.FOREIGN, f"lease {name} is not {sampler_id}'s")
        case Claim.DUPLICATE:
            return _answer(Verdict.DUPLICATE, f"slot {parsed[0]} has its group already")
        case Claim.LOST:
            return _answer(Verdict.FOREIGN, f"slot {parsed[0]} was leased in a time that the ledger has lost")
    learner = accounts.learner
    if learner is None:
        raise RefusedError(Reason.BUSY, "no learner has joined yet", fix="send it again later")
    if accounts.gap:
        raise RefusedError(Reason.BUSY, f"the ledger is behind: {accounts.gap}", fix="send it again later")
    said, has_dissent = None, False
    if isinstance(group, RefusedError):
        problem: tuple[Verdict, str] | None = (Verdict.MALFORMED, str(group))
    else:
        problem = objection(group, accounts.slots.open_slots[parsed[0]], work, learner, is_published)
        if problem is None:
            said = PromptSaid(group.prompt_index, sampler_id, group.prompt_digest)
            dissent = accounts.prompt_agreement.dissent(said)
            has_dissent = bool(dissent.others)
            problem = _outvoted(said, dissent) if dissent.is_outvoted else None
    if problem is not None:
        verdict, detail = problem
        # Options change at the coordinator: who sampled by the old ones, as leased, has done nothing wrong.
        is_outdated = (
            isinstance(group, GroupHeader)
            and bool(other_options(group, work.task_digest))
            and group_id(*parsed) in accounts.leased_before_change
            and verdict is Verdict.FOREIGN
        )
        struck = () if is_outdated else (accounts.standings.of(sampler_id).after_refusal(now=now),)
        spent = Transaction(
            slots=(accounts.slots.spent(*parsed),),
            verdicts=((sampler_id, verdict),),
            prompt_said=said,
            standings=struck,
        )
        return Decision(Submitted(verdict, detail, has_dissent), spent)
    load = accounts.load()
    if is_full(bounds, load, group_bytes=encoded.size_bytes):
        raise RefusedError(
            Reason.BUSY,
            f"the spool has {load.untrained_groups} groups of {load.untrained_bytes} bytes",
            fix="send it again later",
        )
    slot = accounts.slots.submitted(*parsed)
    transaction = Transaction(
        slots=(slot,),
        stored=StoredGroup(*parsed, sampler_id, now, encoded),
        verdicts=((sampler_id, Verdict.SPOOLED),),
        prompt_said=said,
    )
    answered = _answered(accounts, transaction, slot.prompt_index, sampler_id, now=now)
    return Decision(Submitted(Verdict.SPOOLED, has_dissent=has_dissent), answered)


def _answer(verdict: Verdict, detail: str) -> Decision[Submitted]:
    return Decision(Submitted(verdict, detail))


def _outvoted(said: PromptSaid, dissent: Dissent) -> tuple[Verdict, str]:
    return Verdict.FOREIGN, (
        f"prompt {said.prompt_index} has other tokens at {len(dissent.others)} samplers, "
        f"{' and '.join(dissent.others[:2])} among them: compare the task's code, the chat template and the "
        "version of transformers"
    )


def _answered(
    accounts: Accounts, transaction: Transaction, prompt_index: int, sampler_id: str, *, now: float
) -> Transaction:
    """Return the transaction of a group, with what it makes of its sampler and of one that failed its
    prompt."""
    standings, bad_prompts = accounts.standings, accounts.bad_prompts
    before = standings.of(sampler_id)
    after = before.delivered(held=accounts.held(sampler_id))
    wrong = bad_prompts.contradicted(prompt_index, sampler_id, now=now)
    contradicted = (standings.of(name).after_contradiction(now=now) for name in wrong)
    return replace(
        transaction,
        standings=(*(() if after == before else (after,)), *contradicted),
        lifted_prompts=(prompt_index,) if prompt_index in bad_prompts else (),
    )


def _evaluated(
    accounts: Accounts,
    work: Work,
    *,
    sampler_id: str,
    name: str,
    group: GroupHeader | RolloutGroup | RefusedError,
    is_published: Callable[[int], bool],
    now: float,
) -> Decision[Submitted]:
    """Count the group of a held-out prompt; it is not stored, and its verdict is not one of training."""
    evaluations, learner = accounts.evaluations, accounts.learner
    evaluation = evaluations.under_way
    claim = evaluations.claim(name, sampler_id)
    if claim is Claim.DUPLICATE:
        return Decision(Submitted(Verdict.DUPLICATE, f"the prompt of lease {name} has its answer already"))
    if claim is not Claim.WANTED or evaluation is None:
        return Decision(Submitted(Verdict.FOREIGN, f"lease {name} is not {sampler_id}'s"))
    if learner is None:
        raise RefusedError(Reason.BUSY, "no learner has joined yet", fix="send it again later")
    if isinstance(group, RefusedError):
        problem: tuple[Verdict, str] | None = (Verdict.MALFORMED, str(group))
    elif group.run_id != work.run_id:
        problem = (Verdict.FOREIGN, f"it is of run {group.run_id[:100]!r}, this is {work.run_id!r}")
    else:
        assert isinstance(group, RolloutGroup), "the coordinator alone reads what is held out"
        problem = objection(
            group.header, evaluations.slot(name), evaluations.work(work), learner, is_published
        ) or _malformed(group, learner)
        drawn_by = {group.oldest_version, group.newest_version}
        if problem is None and drawn_by != {evaluation.version}:
            other = next(iter(drawn_by - {evaluation.version}))
            detail = f"version {other} drew a token, evaluated is {evaluation.version}"
            problem = (Verdict.STALE, f"{detail}: stay at it until the prompt is generated")
    if problem is not None:
        return Decision(Submitted(*problem), Transaction(evaluation=evaluations.spent(name, now=now)))
    assert isinstance(group, RolloutGroup)
    transaction = Transaction(evaluation=evaluations.counted(name, sampler_id, group, now=now))
    answered = _answered(accounts, transaction, group.prompt_index, sampler_id, now=now)
    return Decision(Submitted(Verdict.SPOOLED), held_against_odd(accounts, answered, now=now))


def _malformed(group: RolloutGroup, learner: Learner) -> tuple[Verdict, str] | None:
    try:
        check_group(group, vocabulary_size=learner.vocabulary_size)
    except RefusedError as refused:
        return Verdict.MALFORMED, refused.what
    return None


def held_against_odd(accounts: Accounts, transaction: Transaction, *, now: float) -> Transaction:
    """Hold it against samplers that an evaluation leaves out: their answers had been taken for deliveries."""
    odd = () if transaction.evaluation is None else transaction.evaluation.odd_samplers
    changed = {standing.sampler_id: standing for standing in transaction.standings}
    for name in odd:
        changed[name] = changed.get(name, accounts.standings.of(name)).after_refusal(now=now)
    return replace(transaction, standings=tuple(changed.values())) if odd else transaction


def evaluation_begins(accounts: Accounts, held: PolicyVersion, *, now: float) -> Decision[None]:
    """Begin the evaluation that is due with the version that a sampler holds."""
    first_prompt = accounts.first_held_out
    is_known = held.number == 0 or held.number in accounts.versions
    if first_prompt is None or _unconfirmed(accounts) or not is_known:
        return Decision(None)
    change = accounts.evaluations.begun(held.number, first_prompt=first_prompt, now=now)
    return Decision(None, Transaction(evaluation=change))


def evaluation_ends(accounts: Accounts, *, now: float) -> Decision[None]:
    """End an evaluation that nobody is left to answer, or whose terms are configured otherwise."""
    if (first_prompt := accounts.first_held_out) is None:
        return Decision(None)
    change = accounts.evaluations.ended(first_prompt=first_prompt, now=now)
    return Decision(None, held_against_odd(accounts, Transaction(evaluation=change), now=now))


def task_is(accounts: Accounts, before: bytes, now_is: bytes) -> Decision[int]:
    """Note the digest of the task's name and options; the answer is how many groups are refused.

    What waits for training was graded by the options before: its slots are leased again. What the learner
    holds it refuses by itself, and what it has trained on by now it reports.
    """
    if now_is == before:
        return Decision(0)
    untrained = accounts.slots.untrained() if before else []
    reopened = [(slot, accounts.slots.refused(slot.number, slot.winner)) for slot in untrained]
    holders = [attempt.holder for slot in untrained if (attempt := slot.attempt(slot.winner)) is not None]
    transaction = Transaction(
        slots=tuple(slot for _, slot in reopened if slot is not None),
        verdicts=tuple((holder, Verdict.FOREIGN) for holder in holders),
        lifted_prompts=accounts.bad_prompts.without(None).lifted if before else (),
        task_digest=now_is,
    )
    return Decision(len(transaction.slots), transaction)


def sampler_joins(
    accounts: Accounts, *, sampler_id: str, task: str, configured: int | None, prompts: int
) -> Decision[RefusedError | None]:
    """Admit a sampler that found ``prompts`` prompts in the run's task; 0: it does not know yet.

    The answer is why it may not work although its word is noted, or None.

    Raises:
        RefusedError: TASK_MISMATCH.
    """
    if not prompts:
        return Decision(None)
    said = agreed_size(
        accounts.task,
        task=task,
        configured=configured,
        words=accounts.size_words,
        prompts=prompts,
        held_out=accounts.evaluations.held_out_prompts,
        sampler_id=sampler_id,
    )
    transaction = Transaction(task=said.size, size_words=() if said.word is None else (said.word,))
    if said.size is not None:
        # Where the task is another one, so are its prompts.
        transaction = replace(transaction, lifted_prompts=accounts.bad_prompts.without(None).lifted)
    return Decision(said.refusal, transaction)


def judgement(accounts: Accounts, judged: GroupVerdict, *, now: float) -> Decision[Judged | None]:
    """Decide what the learner's verdict on a group changes; None: nothing.

    DUPLICATE means that the learner has trained on the group before and the ledger does not know of it: the
    slot is lost, and neither delivered nor leased again. UNINFORMATIVE settles the slot without a step. Where
    that verdict is lost on its way, the group is delivered again and comes into another batch; that doubles
    no training, since the first batch changed nothing.

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
        case Verdict.UNINFORMATIVE:
            slot = accounts.slots.uninformative(*parsed)
        case _:
            slot = accounts.slots.refused(*parsed)
    attempt = slot.attempt(parsed[1]) if slot is not None else None
    if before is None or slot is None or attempt is None:
        return Decision(None)
    is_first = before.state is SlotState.SPOOLED
    answer = Judged(attempt.holder, accounts.spooled_at_s.get(slot.number) if is_first else None)
    standing = accounts.standings.of(attempt.holder)
    is_held_against_it = judged.verdict in _FAULTY and not standing.quarantine
    transaction = Transaction(
        slots=(slot,),
        verdicts=((attempt.holder, judged.verdict),),
        standings=(standing.after_refusal(now=now),) if is_held_against_it else (),
    )
    return Decision(answer, transaction)


def expiry(accounts: Accounts, now: float) -> Decision[int]:
    """End the leases whose time is up, and slots that nobody may take; the answer is how many leases."""
    slots = accounts.slots.expire(now)
    evaluation = accounts.evaluations.expire(now)
    expired = (*slots, *(() if evaluation is None else evaluation.slots))
    holders = Counter(slot.attempts[-1].holder for slot in expired)
    reports = (
        Report(
            slot.prompt_index, tuple(dict.fromkeys(a.holder for a in slot.attempts)), reason, "", slot.number
        )
        for slot in slots
        if slot.state is SlotState.ABANDONED and (reason := slot.last_failure) is Failure.EXPIRED
    )
    bad = accounts.bad_prompts.after(reports, prompts=accounts.slots.prompts, now=now)
    given_up = accounts.slots.given_up(
        now, is_kept_from_some=lambda index: accounts.bad_prompts.is_kept_from_some(index, now=now)
    )
    transaction = Transaction(
        slots=(*slots, *given_up),
        bad_prompts=bad.bad,
        lifted_prompts=bad.lifted,
        evaluation=evaluation,
        standings=tuple(
            accounts.standings.of(name).after_expiry(n, term_s=accounts.lease_ttl_s, now=now)
            for name, n in holders.items()
        ),
    )
    leases = len(slots) + (0 if evaluation is None else evaluation.leases)
    return Decision(leases, held_against_odd(accounts, transaction, now=now))
