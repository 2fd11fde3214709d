"""What the coordinator decides about leases that samplers give back; pure, as ``decisions``."""

from dataclasses import dataclass

from node.coordinator.work.accounts import Accounts, Transaction
from node.coordinator.work.decisions import Decision
from node.coordinator.work.slots import slot_and_attempt
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
    faults, details = [], {}
    for lease in failed:
        number, _ = slot_and_attempt(lease.lease_id)
        entry = accounts.slots.open_slots.get(number)
        is_last = entry is not None and entry.prompt_index in accounts.bad_prompts
        slot = accounts.slots.failed(sampler_id, lease.lease_id, lease.fault, is_last=is_last)
        if slot is not None and number not in slots:
            slots[number] = slot
            faults.append(lease.fault)
            details[number] = lease.detail
    settled = tuple(slots.values())
    bad = accounts.bad_prompts.entries(settled, details=details, now=now)
    leases = len(slots) + (0 if evaluation is None else evaluation.leases)
    return Decision(
        Released(leases, (*faults, *evaluation_faults)),
        Transaction(slots=settled, bad_prompts=bad, evaluation=evaluation),
    )
