"""A sampler's standing: how many leases it may hold, by what became of those it had; pure.

    newcomer --a group--> may hold GROWTH more, as long as it uses a quarter of them
       |
       |-- leases expire -------------------------------> half as many, once a lease term
       |-- a group is refused, or another sampler
       |   answers the prompt it failed ----------------> MISHAP_LEASES fewer
       |-- STRIKES_OUT failures, hardly a group -----------> one lease at a time, with pauses that double
       |-- the learner quarantines it ------------------> one probe, now and then, until the learner is
       |   content
       '-- a verifier proves that it lies --------------> none, until an operator pardons it

This is TCP's slow start: what a sampler may hold follows what it delivers within a round of its own, whether
a round takes a second or an hour. On top of that nobody holds so much of the fleet's room that the others
have less than half of what they delivered lately; alone in a run, a sampler has all of it. All newcomers
together hold a quarter of the room.

A lease has a maximal age too, whatever heartbeats say: AGE_FACTOR times the slowest recent delivery of the
fleet, or of its holder if that is slower, doubled with each strike of the holder up to the configured age. So
a hoarder keeps little, and not for long; a slow but honest sampler is given more time at each try.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from node.coordinator.work.check_bets import PROVEN_CHECKS, is_proof, stake_after
from node.fact import Fact
from node.limits import LEASES_PER_PEER, PROBE_S
from node.run import SamplerStanding
from node.wording import counted

NEWCOMER_LEASES: Final = 4
NEWCOMERS_PART: Final = 8
"""A newcomer may hold an eighth of what it finds free, or four leases."""

ALL_NEWCOMERS_PART: Final = 4
"""All newcomers together hold a quarter of the fleet's leases once somebody has delivered, however many they
are. A crowd of honest ones gets in all the same: each is a newcomer for the length of one group."""

GROWTH: Final = 2
USED_PART: Final = 4
"""Leases more for each group, as long as it holds a quarter of what it may: two to three times as many a
round."""

MISHAP_LEASES: Final = 4
"""With ``GROWTH``: a sampler grows as long as fewer than one lease in three comes to nothing."""

STRIKES_OUT: Final = 8
MOST_STRIKES: Final = 16
"""Failures, of which each group takes back half. A sampler whose grader is broken gets there within eight
leases and is out of it with a group or two; one whose task drops two prompts in three never gets there."""

LONGEST_PAUSE_S: Final = 60.0

LONGEST_PROBE_S: Final = 86_400.0
"""Limit on the time between two groups of a sampler that is quarantined, which begins with PROBE_S and
doubles with each quarantine it had before."""

MOST_STAKE: Final = 1e300
"""Stands for certainty, which a ledger cannot store."""

AGE_FACTOR: Final = 4.0

RECENT_GROUPS: Final = 256
"""Deliveries that shares and paces are remembered for."""


@dataclass(frozen=True, slots=True)
class Standing(Fact):
    """A sampler's account. Delivered and refused groups are counted in its ``Tally``."""

    kind: ClassVar[str] = "standing"

    sampler_id: str
    allowance: int = 0
    """Leases it may hold by what it delivered; 0: it never had one."""
    expired: int = 0
    faulted: int = 0
    """Leases it returned because it could not answer the prompt."""
    contradicted: int = 0
    """How many of those prompts another sampler answered soon after."""
    strikes: int = 0
    struck_at_s: float = 0.0
    halved_at_s: float = 0.0
    quarantines: int = 0
    quarantine: str = ""
    quarantined_at_s: float = 0.0
    probed_at_s: float = 0.0
    checks: int = 0
    """Groups whose rewards were worked out again."""
    differing: int = 0
    """How many of those claimed other rewards."""
    stake: float = 0.0
    """Winnings of a bet that it lies; see ``check_bets``."""
    proven_at_s: float = 0.0
    """When it was proved to lie; 0: it was not."""

    @property
    def key(self) -> str:
        return self.sampler_id

    def granted(self, leases: int, *, free: int, now: float) -> "Standing":
        """Return what so many leases make of it; ``free``: those it found, and those it has."""
        if not leases:
            return self
        if self.quarantine:
            return replace(self, probed_at_s=now)
        return self if self.allowance else replace(self, allowance=newcomers_leases(free))

    def delivered(self, *, held: int) -> "Standing":
        """Return what a group makes of it; ``held``: leases it had, this one included."""
        grows = 0 < self.allowance <= USED_PART * held
        allowance = min(self.allowance + GROWTH, LEASES_PER_PEER) if grows else self.allowance
        return replace(self, allowance=allowance, strikes=self.strikes // 2)

    def after_expiry(self, leases: int, *, term_s: float, now: float) -> "Standing":
        """Return what expired leases make of it: those of one process that died count once."""
        expired = replace(self, expired=self.expired + leases)
        if self.halved_at_s <= now < self.halved_at_s + term_s:
            return expired
        return replace(expired._struck(1, now=now), allowance=max(1, self.allowance // 2), halved_at_s=now)

    def after_faults(self, leases: int, *, now: float) -> "Standing":
        """Return what prompts make of it that it says it cannot answer; nobody has contradicted it yet."""
        return replace(self._struck(leases, now=now), faulted=self.faulted + leases)

    def after_contradiction(self, *, now: float) -> "Standing":
        """Return what becomes of it when another sampler answers a prompt that it failed."""
        return replace(self._shrunk(1, now=now), contradicted=self.contradicted + 1)

    def after_refusal(self, *, now: float) -> "Standing":
        """Return what a refused group makes of it: it had been taken for a delivery."""
        return self._shrunk(2, now=now)

    def after_check(self, *, differs: bool, noise_ratio: float, what: str, now: float) -> "Standing":
        """Return what a check of a group's rewards makes of it; ``what`` differs, for people."""
        stake = stake_after(self.stake, checks=self.checks, differs=differs, noise_ratio=noise_ratio)
        checked = replace(
            self,
            checks=self.checks + 1,
            differing=self.differing + differs,
            stake=min(stake, MOST_STAKE),
        )
        if not differs or not is_proof(stake):
            return checked
        reason = f"its rewards are not its grader's in {checked.differing} of {checked.checks} checks: {what}"
        return replace(checked.in_quarantine(reason, now=now), proven_at_s=now)

    def in_quarantine(self, reason: str, *, now: float) -> "Standing":
        """Return it quarantined; the first probe is due a pause from ``now``."""
        return replace(
            self, quarantine=reason, quarantined_at_s=now, probed_at_s=now, quarantines=self.quarantines + 1
        )

    def pardoned(self) -> "Standing":
        """Return it with nothing held against it; one that had lost its leases is a newcomer again."""
        allowance = self.allowance if self.allowance >= NEWCOMER_LEASES else 0
        forgiven = replace(self, checks=0, differing=0, stake=0.0, proven_at_s=0.0)
        return replace(forgiven.released(), allowance=allowance, quarantines=0)

    def released(self) -> "Standing":
        return replace(self, quarantine="", strikes=0)

    @property
    def is_proven_liar(self) -> bool:
        """Whether it gets no lease and hands nothing in until an operator pardons it."""
        return self.proven_at_s > 0

    @property
    def is_vetted(self) -> bool:
        """Whether its rewards have been checked often enough for batches of its groups alone."""
        return self.checks >= PROVEN_CHECKS

    @property
    def is_struck_out(self) -> bool:
        """Whether it gets one lease at a time, with pauses."""
        return self.strikes >= STRIKES_OUT

    def pause_s(self, now: float) -> float:
        """Return how long a sampler that is quarantined or struck out waits for its one lease."""
        if self.is_proven_liar:
            return LONGEST_PAUSE_S
        if self.quarantine:
            since_s = self.probed_at_s
            term_s = min(PROBE_S * 2.0 ** min(self.quarantines - 1, 30), LONGEST_PROBE_S)
        else:
            since_s = self.struck_at_s
            term_s = min(2.0 ** (self.strikes - STRIKES_OUT), LONGEST_PAUSE_S)
        # A clock that was set back must not keep it waiting for as long as it was wrong.
        return since_s + term_s - now if since_s <= now < since_s + term_s else 0.0

    def _struck(self, strikes: int, *, now: float) -> "Standing":
        return replace(self, strikes=min(self.strikes + strikes, MOST_STRIKES), struck_at_s=now)

    def _shrunk(self, strikes: int, *, now: float) -> "Standing":
        return replace(self._struck(strikes, now=now), allowance=max(1, self.allowance - MISHAP_LEASES))


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
        slow_s = max(self._slow_s, self._paces.get(sampler_id, _Pace()).slowest_s)
        if not self._slow_s:
            return at_most_s
        age_s = AGE_FACTOR * slow_s * 2.0 ** self.of(sampler_id).strikes
        return min(max(age_s, at_least_s), at_most_s)


def newcomers_leases(free: int) -> int:
    """Return how many leases a sampler may hold that never had one."""
    return max(NEWCOMER_LEASES, free // NEWCOMERS_PART)
