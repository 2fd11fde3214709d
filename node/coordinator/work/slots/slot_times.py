"""When leases end, when slots may be leased again and when they are given up: in memory only; pure.

After a restart every lease gets a full term, because nobody could renew it meanwhile.
"""

from collections.abc import Collection, Mapping

from node.coordinator.work.slots.slot import (
    FIRST_RETRY_S,
    SAME_SAMPLER_S,
    SETTLED,
    UNTRAINED,
    WAIT_FOR_OTHERS_S,
    Slot,
    SlotState,
)
from node.values.groups.failure import FAULTS


class SlotTimes:
    """The times of the slots that are not settled."""

    def __init__(self, lease_ttl_s: float) -> None:
        self._lease_ttl_s = lease_ttl_s
        self.deadlines: dict[int, float] = {}
        """When each lease ends. Read by others, as ``granted_at_s``."""
        self._retry_at_s: dict[int, float] = {}
        """When slots with a fault may be leased again."""
        self.granted_at_s: dict[int, float] = {}
        """Time of the newest lease of each slot that is leased or available again."""
        self._waiting: dict[int, float] = {}
        """When slots that are available are given up, if their prompts are kept from somebody."""

    def note(self, slot: Slot, before: Slot | None, *, now: float) -> None:
        """Note what a slot becomes; ``before``: what it was, if it was open. A new lease gets a full term."""
        number = slot.number
        self._retry_at_s.pop(number, None)
        if slot.state is SlotState.AVAILABLE and slot.last_failure in FAULTS:
            self._retry_at_s[number] = now + FIRST_RETRY_S
        if slot.state is not SlotState.AVAILABLE:
            self._waiting.pop(number, None)
        elif before is None or before.state is not SlotState.AVAILABLE:
            self._waiting[number] = now + WAIT_FOR_OTHERS_S
        if slot.state in SETTLED or slot.state in UNTRAINED:
            self.granted_at_s.pop(number, None)
        if slot.lease is None:
            self.deadlines.pop(number, None)
        elif before is None or before.lease != slot.lease:
            self.deadlines[number] = now + self._lease_ttl_s
            self.granted_at_s[number] = now

    def renew(self, number: int, *, now: float, max_age_s: float) -> None:
        """Extend a lease to a full term, unless it has its maximal age."""
        if now < self.granted_at_s[number] + max_age_s:
            self.deadlines[number] = now + self._lease_ttl_s

    def end(self, numbers: Collection[int], *, now: float) -> None:
        """Let leases end now."""
        self.deadlines |= dict.fromkeys(numbers, now)

    def ended(self, now: float) -> list[int]:
        """Return the slots whose lease has ended, lowest first."""
        return _due(self.deadlines, now)

    def waited(self, now: float) -> list[int]:
        """Return the slots that have waited too long for a sampler that may have their prompt."""
        return _due(self._waiting, now)

    def may_retry(self, slot: Slot, holder: str, *, now: float) -> bool:
        """Whether a slot that had a fault may be leased to this sampler now."""
        retry_at_s = self._retry_at_s.get(slot.number, now)
        return retry_at_s + (SAME_SAMPLER_S if slot.had_fault(holder) else 0.0) <= now

    def bound(self, now: float) -> None:
        """Put no time further ahead than it can be: the clock was set back.

        Otherwise what a dead sampler holds would stay leased for as long as the clock was wrong.
        """
        for times, latest_s in (
            (self.deadlines, now + self._lease_ttl_s),
            (self.granted_at_s, now),
            (self._retry_at_s, now + FIRST_RETRY_S),
            (self._waiting, now + WAIT_FOR_OTHERS_S),
        ):
            times.update({number: latest_s for number, at_s in times.items() if at_s > latest_s})


def _due(deadlines: Mapping[int, float], now: float) -> list[int]:
    """Return the slots whose time is up, lowest first; looks at all, 65 536 at most, once a second."""
    return sorted(number for number, at_s in deadlines.items() if at_s <= now)
