"""The coordinator's decisions about leases: each is an answer and a transaction; pure.

``node.coordinator.transactions`` puts the transaction on disk, applies it to the accounts, and only then
returns the answer. A decision that raises has changed nothing. Decisions on groups are in ``verdicts``, on
learners in ``step_history``, on whom to believe in ``trust``.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from node.coordinator.work import sampler_bounds
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.bad_prompts import Aside, Report
from node.coordinator.work.balance import Transaction
from node.coordinator.work.capacity import Capacity, capacity
from node.coordinator.work.group_check import Work
from node.coordinator.work.model_check import check_base
from node.coordinator.work.slots import Slot, SlotKind, SlotState, group_id, version_and_place
from node.failure import FailedLease, Failure
from node.policy import BaseModel, PolicyVersion
from node.rollout import LeaseGrant, LeasePurpose, PromptLease
from node.weights.planning.cheapest_chain import PUBLIC_VERSION

Answer = TypeVar("Answer")

NOTHING: Final = Transaction()

LEARNER_PAUSE_S: Final = 2.0
"""Until a sampler asks again while every lease waits for the learner or the ledger."""

EMPTY_PAUSE_S: Final = 1.0
"""Until a sampler asks again that was granted nothing."""

TOO_OLD: Final = "policy version"
"""The bound that a sampler reaches whose policy is older than the staleness bound."""

CHECKS: Final = "checks"
"""The bound that a sampler reaches of whose groups so many wait to be checked as it may have."""

PARTIAL_PAUSE_S: Final = 0.5
"""Until a sampler asks again that was granted less than it asked for."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[Answer]):
    """An answer, and what must be on disk before it is given."""

    answer: Answer
    transaction: Transaction = NOTHING


def lease(
    accounts: Accounts,
    *,
    sampler_id: str,
    wanted: int,
    held: PolicyVersion | None,
    stays: bool = False,
    now: float,
) -> Decision[LeaseGrant]:
    """Grant as many of ``wanted`` leases as every bound allows.

    Nothing is leased before the learner has confirmed that the ledger lacks nothing: an older ledger would
    lease slots again that were trained on. Nothing is leased for another version 0 than the learner's: a
    sampler that joined before the learner is checked here first. A sampler whose policy is older than the
    staleness bound gets nothing: what it began now would be stale when done, and one that is behind gets as
    much less as it is behind. Nobody gets more than its share (see ``standing``), or anything while it has to
    wait for its own checks (see ``reward_checks``). Held-out prompts come first
    and on top of bounds and share, up to their part of what the sampler may hold by its deliveries.
    They go to samplers that stay at the version under evaluation, however old it is by now; which slots are
    leased does not depend on them.

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
    behind = learner.version - held.number
    is_too_old = behind > accounts.terms.bounds.max_staleness_versions
    free = Capacity(0, TOO_OLD) if is_too_old else room(accounts, behind_versions=max(0, behind))
    share = sampler_bounds.share(accounts, sampler_id, free=free.groups, now=now)
    running = accounts.held(sampler_id)
    unused = max(0, min(wanted, share.leases - running))
    held_out: tuple[Slot, ...] = ()
    if share.allowance:  # samplers that are not believed are asked for training alone
        # One in any case: with none, a sampler whose allowance has shrunk would pass the version by.
        least = int(not accounts.slots.open.running(sampler_id, SlotKind.HELD_OUT))
        may_hand_in = not sampler_bounds.must_wait_for_checks(accounts, sampler_id, now=now)
        allowed = min(wanted, max(least, share.allowance - running)) if stays and may_hand_in else 0
        held_out = accounts.evaluations.grant(
            sampler_id, allowed, held_version=held.number, running=running, now=now
        )
    by_checks = sampler_bounds.lease_room_by_checks(accounts, sampler_id, now=now)
    granted = max(0, min(unused - len(held_out), free.groups))
    waits_for_checks = by_checks is not None and by_checks < granted
    granted = granted if by_checks is None else min(granted, by_checks)
    slots = accounts.slots.grant(
        sampler_id,
        granted,
        now=now,
        aside=lambda prompt_index: _aside(accounts, prompt_index, sampler_id, now=now),
    )
    leased = [slot for slot in slots if slot.state is SlotState.LEASED]
    leases = (
        *(_held_out_lease(accounts, slot) for slot in held_out),
        *(_lease(accounts, slot, accounts.work) for slot in leased),
    )
    standing = accounts.standings.of(sampler_id)
    begun = standing.granted(len(leases), free=running + free.groups, now=now)
    transaction = Transaction(slots=(*held_out, *slots), facts=() if begun == standing else (begun,))
    pause_s, bound = 0.0, ""
    if len(leases) < wanted:
        pause_s = PARTIAL_PAUSE_S if leases else max(EMPTY_PAUSE_S, share.pause_s)
        bound = share.bound if unused < wanted and granted < free.groups else free.bound
        if waits_for_checks:
            bound = CHECKS
        elif len(leased) < granted:
            bound = "prompts"
    is_left = share.allowance > 0 and accounts.evaluations.has_left(
        sampler_id, held_version=held.number, stays=stays
    )
    stop_from = accounts.evaluations.from_version(held.number)
    return Decision(LeaseGrant(leases, pause_s, bound, stop_from, is_left), transaction)


def _held_out_lease(accounts: Accounts, slot: Slot) -> PromptLease:
    version, _ = version_and_place(slot.number)
    lease = _lease(accounts, slot, accounts.evaluations.work(accounts.work))
    return replace(lease, purpose=LeasePurpose.EVALUATION, policy_version=version)


def _aside(accounts: Accounts, prompt_index: int, sampler_id: str, *, now: float) -> Aside:
    if not accounts.is_usable(prompt_index):
        return Aside.FOR_ALL
    return accounts.bad_prompts.aside(prompt_index, sampler_id, now=now)


def _lease(accounts: Accounts, slot: Slot, work: Work) -> PromptLease:
    return PromptLease(
        group_id(slot.number, slot.granted),
        work.task,
        slot.prompt_index,
        work.group_size,
        work.sampling,
        accounts.terms.lease_ttl_s,
        task_digest=work.task_digest,
    )


def room(accounts: Accounts, *, behind_versions: int = 0) -> Capacity:
    """Return how many groups may be leased, to a sampler so far behind the learner."""
    if waits_for := _unconfirmed(accounts):
        return Capacity(0, waits_for)
    return capacity(accounts.terms.bounds, accounts.load(), behind_versions=behind_versions)


def _unconfirmed(accounts: Accounts) -> str:
    if accounts.gap:
        return "ledger"
    return "" if accounts.is_confirmed and accounts.learner is not None else "learner"


@dataclass(frozen=True, slots=True)
class Released:
    """How many of the leases given back the sampler held, and the faults of those that failed."""

    leases: int
    faults: tuple[Failure, ...] = ()


def release(
    accounts: Accounts,
    *,
    sampler_id: str,
    lease_ids: tuple[str, ...],
    failed: tuple[FailedLease, ...],
    now: float,
) -> Decision[Released]:
    """Release leases: ``lease_ids`` were not begun, ``failed`` ones cost their prompts an attempt."""
    slots = {slot.number: slot for slot in accounts.slots.release(sampler_id, lease_ids)}
    faults, reports = [], []
    for lease in failed:
        slot = accounts.slots.failed(sampler_id, lease.lease_id, lease.fault)
        if slot is not None and slot.number not in slots:
            slots[slot.number] = slot
            faults.append(lease.fault)
            if slot.kind is SlotKind.TRAIN:
                report = Report(slot.prompt_index, (sampler_id,), lease.fault, lease.detail, slot.number)
                reports.append(report)
    bad = accounts.bad_prompts.after(reports, prompts=accounts.slots.prompts, now=now)
    standing = accounts.standings.of(sampler_id).after_faults(len(faults), now=now)
    transaction = Transaction(slots=tuple(slots.values()), facts=(*bad, standing) if faults else bad)
    return Decision(Released(len(slots), tuple(faults)), transaction)


def expiry(accounts: Accounts, now: float) -> Decision[int]:
    """End the leases whose time is up, and slots that nobody may take; the answer is how many leases."""
    slots = accounts.slots.expire(now)
    holders = Counter(slot.attempts[-1].holder for slot in slots)
    reports = (
        Report(
            slot.prompt_index, tuple(dict.fromkeys(a.holder for a in slot.attempts)), reason, "", slot.number
        )
        for slot in slots
        if slot.kind is SlotKind.TRAIN
        and slot.state is SlotState.ABANDONED
        and (reason := slot.last_failure) is Failure.EXPIRED
    )
    bad = accounts.bad_prompts.after(reports, prompts=accounts.slots.prompts, now=now)
    given_up = accounts.slots.given_up(
        now, is_kept_from_some=lambda index: accounts.bad_prompts.is_kept_from_some(index, now=now)
    )
    standings = (
        accounts.standings.of(name).after_expiry(n, term_s=accounts.terms.lease_ttl_s, now=now)
        for name, n in holders.items()
    )
    return Decision(len(slots), Transaction(slots=(*slots, *given_up), facts=(*bad, *standings)))


def evaluation_begins(accounts: Accounts, held: PolicyVersion, *, now: float) -> Decision[None]:
    is_known = held.number == 0 or held.number in accounts.versions
    if _unconfirmed(accounts) or not is_known:
        return Decision(None)
    is_checked = accounts.reward_checks.are_made
    change = accounts.evaluations.begun(
        held.number, first_prompt=accounts.first_held_out, is_checked=is_checked, now=now
    )
    return Decision(None, Transaction(slots=change.slots, facts=change.evaluations))


def evaluation_turn(accounts: Accounts, *, now: float) -> Decision[None]:
    """Count the answers to held-out prompts that no check holds back; end an evaluation that is over."""
    change = accounts.evaluations.turn(
        first_prompt=accounts.first_held_out, is_held=accounts.reward_checks.is_held, now=now
    )
    return Decision(None, Transaction(slots=change.slots, facts=change.evaluations))
