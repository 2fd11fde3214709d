"""The coordinator's decisions about groups: submitted ones, and ones the learner has judged; pure.

A verdict is written down where it changes the slot of a lease that the sampler holds. Repeats, and what no
lease asked for, are answered only: they must not cost a write to disk each.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from node.coordinator.work.accounts import Accounts, Transaction
from node.coordinator.work.agreement import PromptSaid
from node.coordinator.work.capacity import is_full
from node.coordinator.work.decisions import Decision, held_against_odd
from node.coordinator.work.evaluation.evaluations import is_evaluation_lease
from node.coordinator.work.group_check import objection
from node.coordinator.work.model_check import Learner
from node.coordinator.work.slot_table import Claim
from node.coordinator.work.slots import SlotState, group_id, parse_group_id
from node.errors import Reason, RefusedError
from node.fact import Fact
from node.rollout import EncodedGroup, GroupHeader, RolloutGroup, check_group, other_options
from node.verdict import GroupVerdict, Verdict

_FAULTY: Final = frozenset({Verdict.SUSPECT, Verdict.FOREIGN, Verdict.MALFORMED})
"""Verdicts of the learner that are held against a sampler; one that is far away may be stale through no
fault."""


@dataclass(frozen=True, slots=True)
class Submitted:
    verdict: Verdict
    detail: str = ""
    has_dissent: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    sampler_id: str
    spooled_at_s: float | None
    """Unix seconds; None where the group was judged before."""


def submission(
    accounts: Accounts,
    encoded: EncodedGroup,
    group: GroupHeader | RolloutGroup | RefusedError,
    *,
    is_published: Callable[[int], bool],
    now: float,
) -> Decision[Submitted]:
    """Decide what becomes of a group that is submitted.

    Args:
        encoded: As it came, to be stored; its sampler is proved.
        group: Its header, or all of it where the prompt is held out; or why it could not be decoded.
        is_published: Whether a policy version was ever announced.
    Raises:
        RefusedError: BUSY; the spool is full.
    """
    sampler_id, name = encoded.sampler_id, encoded.group_id
    if (standing := accounts.standings.of(sampler_id)).is_proven_liar:
        return _answer(Verdict.SUSPECT, standing.quarantine)
    if is_evaluation_lease(name):
        return _evaluated(accounts, encoded, group, is_published, now=now)
    work, parsed = accounts.work, parse_group_id(name)
    header = group.header if isinstance(group, RolloutGroup) else group
    if parsed is None:
        return _answer(Verdict.MALFORMED, f"{name[:100]!r} is not a group id; expected <slot>.<attempt>")
    if isinstance(header, GroupHeader) and header.run_id != work.run_id:
        return _answer(Verdict.FOREIGN, f"it is of run {header.run_id[:100]!r}, this is {work.run_id!r}")
    match accounts.slots.claim(*parsed, sampler_id):
        case Claim.NEVER_GRANTED:
            return _answer(Verdict.FOREIGN, f"lease {name} is not {sampler_id}'s")
        case Claim.DUPLICATE:
            return _answer(Verdict.DUPLICATE, f"slot {parsed[0]} has its group already")
        case Claim.LOST:
            return _answer(Verdict.FOREIGN, f"slot {parsed[0]} was leased in a time that the ledger has lost")
    learner = _joined_learner(accounts)
    if accounts.gap:
        raise RefusedError(Reason.BUSY, f"the ledger is behind: {accounts.gap}", fix="send it again later")
    if isinstance(header, RefusedError):
        refused = Submitted(Verdict.MALFORMED, str(header))
        return Decision(refused, _spent(accounts, parsed, sampler_id, refused, now=now))
    said, has_dissent = None, False
    problem = objection(
        header,
        accounts.slots.open_slots[parsed[0]],
        work,
        learner,
        is_published,
        is_confirmed=accounts.is_confirmed,
    )
    if problem is None:
        said = PromptSaid(header.prompt_index, sampler_id, header.prompt_digest)
        dissent = accounts.prompt_agreement.dissent(said)
        has_dissent = bool(dissent.others)
        if dissent.is_outvoted:
            detail = (
                f"prompt {said.prompt_index} has other tokens at {len(dissent.others)} samplers, "
                f"{' and '.join(dissent.others[:2])} among them: compare the task's code, the chat template "
                "and the version of transformers"
            )
            problem = (Verdict.FOREIGN, detail)
    if problem is not None:
        refused = Submitted(*problem, has_dissent)
        # Options change at the coordinator: who sampled by the old ones, as leased, has done nothing wrong.
        is_outdated = (
            bool(other_options(header, work.task_digest))
            and group_id(*parsed) in accounts.leased_before_change
            and refused.verdict is Verdict.FOREIGN
        )
        spent = _spent(accounts, parsed, sampler_id, refused, now=now, is_held_against=not is_outdated)
        return Decision(refused, replace(spent, prompt_said=said))
    # Without its proof, which has served its purpose.
    stored = EncodedGroup(encoded.header, encoded.columns, name, sampler_id, spooled_at_s=now)
    spooled = _spooled(accounts, parsed, stored, said, now=now)
    return Decision(Submitted(Verdict.SPOOLED, has_dissent=has_dissent), spooled)


def _spooled(
    accounts: Accounts,
    slot_and_attempt: tuple[int, int],
    stored: EncodedGroup,
    said: PromptSaid | None,
    *,
    now: float,
) -> Transaction:
    load = accounts.load()
    if is_full(accounts.terms.bounds, load, group_bytes=stored.size_bytes):
        raise RefusedError(
            Reason.BUSY,
            f"the spool has {load.untrained_groups} groups of {load.untrained_bytes} bytes",
            fix="send it again later",
        )
    if accounts.must_wait_for_checks(stored.sampler_id, now=now):
        waiting = accounts.reward_checks.held_by(stored.sampler_id)
        what = f"{waiting} groups of {stored.sampler_id} wait for a check of their rewards"
        raise RefusedError(Reason.BUSY, what, fix="send it again later")
    slot = accounts.slots.submitted(*slot_and_attempt, is_graded=not accounts.work.verifiers_grade)
    transaction = Transaction(
        slots=(slot,),
        stored=stored,
        facts=accounts.tallies.after([(stored.sampler_id, Verdict.SPOOLED)]),
        prompt_said=said,
    )
    return _answered(accounts, transaction, slot.prompt_index, stored.sampler_id, now=now)


def _spent(
    accounts: Accounts,
    slot_and_attempt: tuple[int, int],
    sampler_id: str,
    refused: Submitted,
    *,
    now: float,
    is_held_against: bool = True,
) -> Transaction:
    """Return what a group that nobody can use makes of its slot and its sampler."""
    standing = accounts.standings.of(sampler_id).after_refusal(now=now)
    return Transaction(
        slots=(accounts.slots.spent(*slot_and_attempt),),
        facts=(
            *accounts.tallies.after([(sampler_id, refused.verdict)]),
            *((standing,) if is_held_against else ()),
        ),
    )


def _answer(verdict: Verdict, detail: str) -> Decision[Submitted]:
    return Decision(Submitted(verdict, detail))


def _joined_learner(accounts: Accounts) -> Learner:
    if accounts.learner is None:
        raise RefusedError(Reason.BUSY, "no learner has joined yet", fix="send it again later")
    return accounts.learner


def _answered(
    accounts: Accounts, transaction: Transaction, prompt_index: int, sampler_id: str, *, now: float
) -> Transaction:
    """Return the transaction of a group, with what it makes of its sampler and of one that failed its
    prompt."""
    standings, bad_prompts = accounts.standings, accounts.bad_prompts
    before = standings.of(sampler_id)
    after = before.delivered(held=accounts.held(sampler_id))
    if after == before and prompt_index not in bad_prompts:
        return transaction
    wrong = bad_prompts.contradicted(prompt_index, sampler_id, now=now)
    contradicted = (standings.of(name).after_contradiction(now=now) for name in wrong)
    changed = () if after == before else (after,)
    facts = (*transaction.facts, *changed, *contradicted, *bad_prompts.lifted(prompt_index))
    return replace(transaction, facts=facts)


def _evaluated(
    accounts: Accounts,
    encoded: EncodedGroup,
    group: GroupHeader | RolloutGroup | RefusedError,
    is_published: Callable[[int], bool],
    *,
    now: float,
) -> Decision[Submitted]:
    """Count the group of a held-out prompt; it is not stored, and its verdict is not one of training."""
    sampler_id, name = encoded.sampler_id, encoded.group_id
    evaluations, work = accounts.evaluations, accounts.work
    evaluation, claim = evaluations.under_way, evaluations.claim(name, sampler_id)
    if claim is Claim.DUPLICATE:
        return _answer(Verdict.DUPLICATE, f"the prompt of lease {name} has its answer already")
    if claim is not Claim.WANTED or evaluation is None:
        return _answer(Verdict.FOREIGN, f"lease {name} is not {sampler_id}'s")
    learner = _joined_learner(accounts)
    if isinstance(group, RefusedError):
        problem: tuple[Verdict, str] | None = (Verdict.MALFORMED, str(group))
    elif group.run_id != work.run_id:
        problem = (Verdict.FOREIGN, f"it is of run {group.run_id[:100]!r}, this is {work.run_id!r}")
    else:
        assert isinstance(group, RolloutGroup), "the coordinator alone reads what is held out"
        asked, slot = evaluations.work(work), evaluations.slot(name)
        problem = objection(
            group.header, slot, asked, learner, is_published, is_confirmed=accounts.is_confirmed
        ) or _malformed(group, learner)
        drawn_by = {group.oldest_version, group.newest_version}
        if problem is None and drawn_by != {evaluation.version}:
            other = next(iter(drawn_by - {evaluation.version}))
            detail = f"version {other} drew a token, evaluated is {evaluation.version}"
            problem = (Verdict.STALE, f"{detail}: stay at it until the prompt is generated")
    if problem is not None:
        return Decision(Submitted(*problem), Transaction(evaluation=evaluations.spent(name, now=now)))
    assert isinstance(group, RolloutGroup)
    answer = EncodedGroup(encoded.header, encoded.columns, name, sampler_id, spooled_at_s=now)
    transaction = Transaction(
        evaluation=evaluations.counted(name, sampler_id, group, now=now), answered=answer
    )
    answered = _answered(accounts, transaction, group.prompt_index, sampler_id, now=now)
    return Decision(Submitted(Verdict.SPOOLED), held_against_odd(accounts, answered, now=now))


def _malformed(group: RolloutGroup, learner: Learner) -> tuple[Verdict, str] | None:
    try:
        check_group(group, vocabulary_size=learner.vocabulary_size)
    except RefusedError as refused:
        return Verdict.MALFORMED, refused.what
    return None


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
    slot = accounts.slots.judged(*parsed, judged.verdict)
    attempt = slot.attempt(parsed[1]) if slot is not None else None
    if before is None or slot is None or attempt is None:
        return Decision(None)
    is_first = before.state is SlotState.SPOOLED
    answer = Judged(attempt.holder, accounts.spooled_at_s.get(slot.number) if is_first else None)
    standing = accounts.standings.of(attempt.holder)
    is_held_against_it = judged.verdict in _FAULTY and not standing.quarantine
    facts: tuple[Fact, ...] = accounts.tallies.after([(attempt.holder, judged.verdict)])
    if is_held_against_it:
        facts = (*facts, standing.after_refusal(now=now))
    return Decision(answer, Transaction(slots=(slot,), facts=facts))
