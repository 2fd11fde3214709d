"""How much work one sampler may have, by its standing and by the checks of its groups; pure."""

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.sampler_standing import Share
from node.coordinator.work.slots import SlotKind, SlotState


def share(accounts: Accounts, sampler_id: str, *, free: int, now: float) -> Share:
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


def must_wait_for_checks(accounts: Accounts, sampler_id: str, *, now: float) -> bool:
    """Whether a sampler hands in and is leased no more until groups of its own are checked."""
    is_vetted = sampler_id in accounts.standings.vetted
    return accounts.reward_checks.must_wait(sampler_id, is_vetted=is_vetted, now=now)


def lease_room_by_checks(accounts: Accounts, sampler_id: str, *, now: float) -> int | None:
    """Return how many more leases a sampler may have by its own checks; None: they bound nothing."""
    return accounts.reward_checks.lease_room(
        sampler_id,
        running=accounts.slots.open.running(sampler_id),
        is_vetted=sampler_id in accounts.standings.vetted,
        now=now,
    )
