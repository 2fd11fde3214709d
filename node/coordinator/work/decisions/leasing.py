"""Decisions about leases: granted, given back, expired; and those of held-out prompts; pure."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.capacity import Capacity, capacity
from node.coordinator.work.decisions.decision import Decision
from node.coordinator.work.samplers.standings import Share
from node.coordinator.work.slots.bad_prompts import Aside, Report
from node.coordinator.work.slots.slot import Slot, SlotKind, SlotState, group_id, version_and_place
from node.coordinator.work.terms.model_check import check_base
from node.coordinator.work.terms.run_terms import Work
from node.values.groups.failure import FailedLease, Failure
from node.values.groups.rollout import LeaseGrant, LeasePurpose, PromptLease
from node.values.policy import BaseModel, PolicyVersion
from node.weights.planning.cheapest_chain import PUBLIC_VERSION

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
class LeaseRequest:
    """A sampler's request for leases."""

    sampler_id: str
    wanted: int
    held: PolicyVersion | None
    """The version that it will sample with, or a newer one; None: it holds none yet."""
    stays: bool = False
    """Whether it stays at that version for the held-out prompts that it is leased."""


def lease(accounts: Accounts, request: LeaseRequest, *, now: float) -> Decision[LeaseGrant]:
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
    sampler_id, wanted, held = request.sampler_id, request.wanted, request.held
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
    share = share_of(accounts, sampler_id, free=free.groups, now=now)
    running = accounts.held(sampler_id)
    unused = max(0, min(wanted, share.leases - running))
    held_out: tuple[Slot, ...] = ()
    if share.allowance:  # samplers that are not believed are asked for training alone
        # One in any case: with none, a sampler whose allowance has shrunk would pass the version by.
        least = int(not accounts.slots.open.running(sampler_id, SlotKind.HELD_OUT))
        may_hand_in = not accounts.must_wait_for_checks(sampler_id, now=now)
        allowed = min(wanted, max(least, share.allowance - running)) if request.stays and may_hand_in else 0
        held_out = accounts.evaluations.grant(
            sampler_id, allowed, held_version=held.number, running=running, now=now
        )
    by_checks = _room_by_checks(accounts, sampler_id, now=now)
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
        sampler_id, held_version=held.number, stays=request.stays
    )
    stop_from = accounts.evaluations.from_version(held.number)
    return Decision(LeaseGrant(leases, pause_s, bound, stop_from, is_left), transaction)


def share_of(accounts: Accounts, sampler_id: str, *, free: int, now: float) -> Share:
    """Return how many leases a sampler may hold, where ``free`` groups may be leased."""
    slots = accounts.slots
    evaluating = slots.open.running(sampler_id, SlotKind.HELD_OUT)  # on top of every bound
    return accounts.standings.share(
        sampler_id,
        held=slots.open.running(sampler_id) + evaluating,
        free=free,
        fleet=slots.counts()[SlotState.LEASED] + evaluating,
        newcomers=slots.open.newcomers_leases,
        now=now,
    )


def _room_by_checks(accounts: Accounts, sampler_id: str, *, now: float) -> int | None:
    """Return how many more leases a sampler may have by its own checks; None: they bound nothing."""
    return accounts.reward_checks.lease_room(
        sampler_id,
        running=accounts.slots.open.running(sampler_id),
        is_vetted=sampler_id in accounts.standings.vetted,
        now=now,
    )


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
    return capacity(accounts.bounds, accounts.load(), behind_versions=behind_versions)


def _unconfirmed(accounts: Accounts) -> str:
    if accounts.gap:
        return "ledger"
    return "" if accounts.is_confirmed and accounts.learner is not None else "learner"


@dataclass(frozen=True, slots=True)
class ReturnedLeases:
    """Leases that a sampler gives back."""

    sampler_id: str
    lease_ids: tuple[str, ...]
    """Leases that it did not begin."""
    failed: tuple[FailedLease, ...] = ()
    """Leases that cost their prompts an attempt."""


@dataclass(frozen=True, slots=True)
class Released:
    """How many of the leases given back the sampler held, and the faults of those that failed."""

    leases: int
    faults: tuple[Failure, ...] = ()


def release(accounts: Accounts, request: ReturnedLeases, *, now: float) -> Decision[Released]:
    """Release leases: their slots are leased again."""
    sampler_id = request.sampler_id
    slots = {slot.number: slot for slot in accounts.slots.release(sampler_id, request.lease_ids)}
    faults, reports = [], []
    for lease in request.failed:
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


def evaluation_begins(accounts: Accounts, request: PolicyVersion, *, now: float) -> Decision[None]:
    """Begin the evaluation of the version that a sampler holds, if it is due and known."""
    held = request
    is_known = held.number == 0 or held.number in accounts.versions
    if _unconfirmed(accounts) or not is_known:
        return Decision(None)
    is_checked = accounts.reward_checks.are_made
    change = accounts.evaluations.begun(
        held.number, first_prompt=accounts.first_held_out, is_checked=is_checked, now=now
    )
    return Decision(None, Transaction(slots=change.slots, facts=change.evaluations))


@dataclass(frozen=True, slots=True)
class Expired:
    leases: int


def expiry(accounts: Accounts, *, now: float) -> Decision[Expired]:
    """End the leases whose time is up, and slots that nobody may take."""
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
    return Decision(Expired(len(slots)), Transaction(slots=(*slots, *given_up), facts=(*bad, *standings)))
