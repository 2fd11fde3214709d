"""What the coordinator decides about leases that samplers give back; pure, as ``decisions``."""

from dataclasses import dataclass

from node.coordinator.work.accounts import Accounts, Transaction
from node.coordinator.work.bad_prompts import Report
from node.coordinator.work.decisions import Decision, held_against_odd
from node.failure import FailedLease, Failure


@dataclass(frozen=True, slots=True)
class Released:
    """The answer to leases that are given back."""

    leases: int
    """How many of them the sampler held."""
    faults: tuple[Failure, ...] = ()
    """Of those that failed."""


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
    evaluation, evaluation_faults = accounts.evaluations.given_back(sampler_id, lease_ids, failed, now=now)
    faults, reports = [], []
    for lease in failed:
        slot = accounts.slots.failed(sampler_id, lease.lease_id, lease.fault)
        if slot is not None and slot.number not in slots:
            slots[slot.number] = slot
            faults.append(lease.fault)
            reports.append(Report(slot.prompt_index, (sampler_id,), lease.fault, lease.detail, slot.number))
    bad = accounts.bad_prompts.after(reports, prompts=accounts.slots.prompts, now=now)
    faults += evaluation_faults
    standing = accounts.standings.of(sampler_id).after_faults(len(faults), now=now)
    transaction = Transaction(
        slots=tuple(slots.values()),
        bad_prompts=bad.bad,
        lifted_prompts=bad.lifted,
        evaluation=evaluation,
        standings=(standing,) if faults else (),
    )
    return Decision(
        Released(len(slots) + (0 if evaluation is None else evaluation.leases), tuple(faults)),
        held_against_odd(accounts, transaction, now=now),
    )
