"""The standings of all samplers: who holds how much of the fleet's room, and for how long; pure.

Nobody holds so much of the fleet's room that the others have less than half of what they delivered lately;
alone in a run, a sampler has all of it. All newcomers together hold a quarter of the room.

A lease has a maximal age too, whatever heartbeats say: AGE_FACTOR times the slowest recent delivery of the
fleet, or of its holder if that is slower, doubled with each strike of the holder up to the configured age. So
a hoarder keeps little, and not for long; a slow but honest sampler is given more time at each try.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from node.coordinator.work.samplers.sampler_standing import NEWCOMER_LEASES, Standing, newcomers_leases
from node.text.wording import counted
from node.values.limits import LEASES_PER_PEER
from node.values.run import SamplerStanding

ALL_NEWCOMERS_PART: Final = 4
"""All newcomers together hold a quarter of the fleet's leases once somebody has delivered, however many they
are. A crowd of honest ones gets in all the same: each is a newcomer for the length of one group."""

AGE_FACTOR: Final = 4.0

RECENT_GROUPS: Final = 256
"""Deliveries that shares and paces are remembered for."""


@dataclass(frozen=True, slots=True)
class Share:
    leases: int
    bound: str
    """share, faults or quarantine."""
    pause_s: float = 0.0
    """Until it may have one, where it may have none now."""
    allowance: int = 0
    """Leases it may hold by what it delivered, however little room the fleet has; 0: it is not believed."""


@dataclass(slots=True)
class _Pace:
    """Recent deliveries, in memory only."""

    groups: float = 0.0
    """Recent ones, in the unit of ``Standings._unit``."""
    slowest_s: float = 0.0
    """Longest time from lease to group, fading."""


@dataclass(slots=True)
class Standings:
    _of: dict[str, Standing] = field(default_factory=dict)
    vetted: set[str] = field(default_factory=set)
    """Samplers whose rewards have been checked often enough; the others are newcomers to batches."""
    _paces: dict[str, _Pace] = field(default_factory=dict)
    _unit: float = 1.0
    """Weight of the next delivery: it grows, so that older ones fade."""
    _recent: float = 0.0
    _slow_s: float = 0.0
    """Nine in ten deliveries of the fleet are faster; 0: none was timed."""

    @classmethod
    def restored(cls, standings: Iterable[Standing], delivered: Mapping[str, int]) -> "Standings":
        """Restore from the ledger; shares of recent deliveries begin as those of all groups ever
        ``delivered``."""
        restored = cls()
        for standing in standings:
            restored.apply(standing)
        total = sum(delivered.values())
        for sampler_id, groups in delivered.items():
            if groups:
                recent = min(total, RECENT_GROUPS) * groups / total
                restored._paces[sampler_id] = _Pace(groups=recent)
                restored._recent += recent
        return restored

    def __iter__(self) -> Iterator[Standing]:
        return iter(self._of.values())

    def of(self, sampler_id: str) -> Standing:
        return self._of.get(sampler_id) or Standing(sampler_id)

    def quarantined(self) -> tuple[Standing, ...]:
        return tuple(standing for standing in self._of.values() if standing.quarantine)

    def apply(self, standing: Standing) -> None:
        self._of[standing.sampler_id] = standing
        (self.vetted.add if standing.is_vetted else self.vetted.discard)(standing.sampler_id)

    def note_delivery(self, sampler_id: str, took_s: float | None) -> None:
        """Note a group; ``took_s``: from its lease on, None where that is not known."""
        pace = self._paces.setdefault(sampler_id, _Pace())
        pace.groups += self._unit
        self._recent += self._unit
        self._unit *= 1.0 + 1.0 / RECENT_GROUPS
        if self._unit > 1e12:
            for one in self._paces.values():
                one.groups /= self._unit
            self._recent, self._unit = self._recent / self._unit, 1.0
        if took_s is None:
            return
        pace.slowest_s = max(took_s, pace.slowest_s * (1.0 - 1.0 / 32))
        if not self._slow_s:
            self._slow_s = took_s
        self._slow_s *= 1.09 if took_s > self._slow_s else 0.99  # at rest where one in ten is slower

    def recent_share(self, sampler_id: str) -> float:
        """Return the sampler's part of recent deliveries, 0 to 1; 1 before the first."""
        pace = self._paces.get(sampler_id, _Pace())
        return pace.groups / self._recent if self._recent else 1.0

    def share(
        self, sampler_id: str, *, held: int, free: int, fleet: int, newcomers: int, now: float
    ) -> Share:
        """Return how many leases a sampler may hold.

        Args:
            fleet: Leases that all samplers hold; ``newcomers``: of those, of samplers that never delivered.
        """
        standing = self.of(sampler_id)
        if standing.quarantine or standing.is_struck_out:
            pause_s = standing.pause_s(now)
            return Share(0 if pause_s else 1, "quarantine" if standing.quarantine else "faults", pause_s)
        allowance = standing.allowance or newcomers_leases(held + free)
        half_of_others = (1.0 + self.recent_share(sampler_id)) / 2.0
        most = max(1, min(allowance, int(half_of_others * (fleet + free)), LEASES_PER_PEER))
        if self._recent and sampler_id not in self._paces:
            together = max(NEWCOMER_LEASES, (fleet + free) // ALL_NEWCOMERS_PART)
            most = max(0, min(most, together - newcomers + held))
        return Share(most, "share", allowance=min(allowance, LEASES_PER_PEER))

    def word(
        self, sampler_id: str, *, delivered: int, held: int, oldest_s: float, max_age_s: float, now: float
    ) -> tuple[SamplerStanding, str]:
        """Return a sampler's standing for people, and what there is to say of it."""
        one = self.of(sampler_id)
        if one.quarantine:
            for_s = max(0.0, now - one.quarantined_at_s)
            return SamplerStanding.QUARANTINED, f"for {for_s:.0f} s: {one.quarantine}"
        if one.is_struck_out:
            return SamplerStanding.FAILING, (
                f"{counted(one.faulted, 'lease')} failed, of whose prompts others answered "
                f"{one.contradicted}, and {one.expired} expired: it gets one at a time"
            )
        if (held and 2 * oldest_s > max_age_s) or (one.strikes and one.expired > delivered):
            return SamplerStanding.HOARDS, (
                f"holds {counted(held, 'lease')}, the oldest for {oldest_s:.0f} s "
                f"(ends at {max_age_s:.0f} s); {one.expired} expired, {counted(delivered, 'group')} delivered"
            )
        return SamplerStanding.ESTABLISHED if delivered else SamplerStanding.NEWCOMER, ""

    def max_age_s(self, sampler_id: str, *, at_least_s: float, at_most_s: float) -> float:
        """Return the age at which a lease of the sampler ends, whatever its heartbeats say."""
        if not self._slow_s:
            return at_most_s
        slow_s = max(self._slow_s, self._paces.get(sampler_id, _Pace()).slowest_s)
        age_s = AGE_FACTOR * slow_s * 2.0 ** self.of(sampler_id).strikes
        return min(max(age_s, at_least_s), at_most_s)
