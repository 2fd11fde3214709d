"""Decisions on groups that samplers submit: stored, refused, or a replay of one that was; pure.

A verdict is written down where it changes the slot of a lease that the sampler holds. Repeats, and what no
lease asked for, are answered only: they must not cost a write to disk each.
"""

from dataclasses import dataclass, field, replace

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.capacity import is_full
from node.coordinator.work.decisions.decision import NOTHING, Decision
from node.coordinator.work.slots.slot import (
    HeldOutAnswer,
    SlotKind,
    group_id,
    kind_of,
    parse_group_id,
    parse_held_out_id,
    version_and_place,
)
from node.coordinator.work.slots.slot_table import Claim
from node.coordinator.work.terms.group_check import objection
from node.coordinator.work.terms.model_check import Learner
from node.errors import Reason, RefusedError
from node.values.groups.rollout import EncodedGroup, GroupHeader, other_options
from node.values.groups.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Submission:
    """A group that a sampler hands in."""

    encoded: EncodedGroup
    """As it came, to be stored; its sampler is proved."""
    header: GroupHeader | RefusedError
    """Or why the group could not be read."""
    answer: HeldOutAnswer | None = None
    """The group in numbers where its prompt is held out; None where it is of training."""


@dataclass(frozen=True, slots=True)
class Submitted:
    verdict: Verdict
    detail: str = ""
    submission: Submission | None = field(default=None, compare=False)


def submission(accounts: Accounts, request: Submission, *, now: float) -> Decision[Submitted]:
    """Decide what becomes of a group that is submitted.

    Raises:
        RefusedError: BUSY; the spool is full.
    """

    def answer(verdict: Verdict, detail: str, changes: Transaction = NOTHING) -> Decision[Submitted]:
        return Decision(Submitted(verdict, detail, request), changes)

    encoded, header = request.encoded, request.header
    sampler_id, name = encoded.sampler_id, encoded.group_id
    if (standing := accounts.standings.of(sampler_id)).is_proven_liar:
        return answer(Verdict.SUSPECT, standing.quarantine)
    work, parsed = accounts.work, parse_group_id(name) or parse_held_out_id(name)
    if parsed is None:
        return answer(Verdict.MALFORMED, f"{name[:100]!r} is not a group id; expected <slot>.<attempt>")
    if isinstance(header, GroupHeader) and header.run_id != work.run_id:
        return answer(Verdict.FOREIGN, f"it is of run {header.run_id[:100]!r}, this is {work.run_id!r}")
    match _claim(accounts, parsed, sampler_id):
        case Claim.NEVER_GRANTED:
            return answer(Verdict.FOREIGN, f"lease {name} is not {sampler_id}'s")
        case Claim.DUPLICATE:
            return answer(Verdict.DUPLICATE, f"the slot of lease {name} has its group already")
        case Claim.LOST:
            return answer(Verdict.FOREIGN, f"slot {parsed[0]} was leased in a time that the ledger has lost")
    learner = _joined_learner(accounts)
    if accounts.gap:
        raise RefusedError(Reason.BUSY, f"the ledger is behind: {accounts.gap}", fix="send it again later")
    if isinstance(header, RefusedError):
        spent = _spent(accounts, parsed, sampler_id, Verdict.MALFORMED, now=now)
        return answer(Verdict.MALFORMED, str(header), spent)
    # As it came, with its sampler and its time.
    stored = EncodedGroup(encoded.header, encoded.columns, name, sampler_id, spooled_at_s=now)
    slot, is_confirmed = accounts.slots.open_slots[parsed[0]], accounts.is_confirmed
    if slot.kind is SlotKind.HELD_OUT:
        assert request.answer is not None, "the coordinator alone reads what is held out"
        asked = accounts.evaluations.work(work)
        problem = objection(
            header, slot, asked, learner, accounts.has_been_made, is_confirmed=is_confirmed
        ) or _of_other_version(header, version=version_and_place(slot.number)[0])
        if problem is not None:
            return answer(*problem, _spent(accounts, parsed, sampler_id, problem[0], now=now))
        stores = _spooled(accounts, parsed, stored, answer=request.answer, now=now)
        return answer(Verdict.SPOOLED, "", stores)
    problem = objection(header, slot, work, learner, accounts.has_been_made, is_confirmed=is_confirmed)
    if problem is not None:
        verdict, detail = problem
        # Options change at the coordinator: who sampled by the old ones, as leased, has done nothing wrong.
        is_outdated = (
            bool(other_options(header, work.task_digest))
            and group_id(*parsed) in accounts.leased_before_change
            and verdict is Verdict.FOREIGN
        )
        spent = _spent(accounts, parsed, sampler_id, verdict, now=now, is_held_against=not is_outdated)
        return answer(verdict, detail, spent)
    return answer(Verdict.SPOOLED, "", _spooled(accounts, parsed, stored, now=now))


def _claim(accounts: Accounts, slot_and_attempt: tuple[int, int], sampler_id: str) -> Claim:
    number, attempt = slot_and_attempt
    claim = accounts.slots.claim(number, attempt, sampler_id)
    if claim is Claim.WANTED and kind_of(number) is SlotKind.HELD_OUT:
        return Claim.DUPLICATE if accounts.evaluations.has_answered(sampler_id, number) else claim
    return claim


def _of_other_version(header: GroupHeader, *, version: int) -> tuple[Verdict, str] | None:
    """Return why a group says nothing about a version; None where it does."""
    others = {header.oldest_version, header.newest_version} - {version}
    if not others:
        return None
    detail = f"version {min(others)} drew a token, evaluated is {version}"
    return Verdict.STALE, f"{detail}: stay at it until the prompt is generated"


def _spooled(
    accounts: Accounts,
    slot_and_attempt: tuple[int, int],
    stored: EncodedGroup,
    *,
    answer: HeldOutAnswer | None = None,
    now: float,
) -> Transaction:
    """Return what stores a group; ``answer``: what one that answers a held-out prompt says."""
    bounds, groups = accounts.bounds, len(accounts.slots.open.untrained)
    size_bytes = accounts.spooled.untrained_bytes
    if answer is None and is_full(
        bounds, untrained_groups=groups, untrained_bytes=size_bytes, group_bytes=stored.size_bytes
    ):
        what = f"the spool has {groups} groups of {size_bytes} bytes"
        raise RefusedError(Reason.BUSY, what, fix="send it again later")
    waiting_bytes = 0 if answer is None else accounts.held_out_bytes()
    if waiting_bytes and waiting_bytes + stored.size_bytes > bounds.buffer_bytes:
        what = f"{waiting_bytes} bytes of answers to held-out prompts wait for a check"
        raise RefusedError(Reason.BUSY, what, fix="send it again later")
    if accounts.must_wait_for_checks(stored.sampler_id, now=now):
        waiting = accounts.reward_checks.held_by(stored.sampler_id)
        what = f"{waiting} groups of {stored.sampler_id} wait for a check of their rewards"
        raise RefusedError(Reason.BUSY, what, fix="send it again later")
    is_graded = not accounts.work.verifiers_grade
    slot = accounts.slots.submitted(*slot_and_attempt, is_graded=is_graded, answer=answer)
    tallies = accounts.tallies.after([(stored.sampler_id, Verdict.SPOOLED)] if answer is None else [])
    transaction = Transaction(slots=(slot,), stored=stored, facts=tallies)
    return _answered(accounts, transaction, slot.prompt_index, stored.sampler_id, now=now)


def _spent(
    accounts: Accounts,
    slot_and_attempt: tuple[int, int],
    sampler_id: str,
    verdict: Verdict,
    *,
    now: float,
    is_held_against: bool = True,
) -> Transaction:
    """Return what a group that nobody can use makes of its slot and its sampler.

    One that answers a held-out prompt is not counted among those of training, nor held against its sampler:
    one that has to go on to a newer version brings it through no fault of its own.
    """
    slots = (accounts.slots.spent(*slot_and_attempt),)
    if kind_of(slot_and_attempt[0]) is SlotKind.HELD_OUT:
        return Transaction(slots=slots)
    standing = accounts.standings.of(sampler_id).after_refusal(now=now)
    tallies = accounts.tallies.after([(sampler_id, verdict)])
    return Transaction(slots=slots, facts=(*tallies, standing) if is_held_against else tallies)


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
