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
a round takes a second or an hour. How the fleet's room is shared out is in ``standings``.

Where the grader is deterministic, one group with other rewards is proof that a sampler lies. Where honest
samplers may differ in a share of their groups, checks are bets against "it differs no more often than that":
the stake grows by ``LYING_SHARE`` over that share with each difference, shrinks a little with each agreement,
and is spread over all moments at which a sampler may begin to lie. An honest sampler's stake reaches 1 /
``FALSE_ALARM`` in a whole run with probability ``FALSE_ALARM`` at most (Ville's inequality).
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from node.values.fact import Fact
from node.values.limits import LEASES_PER_PEER, PROBE_S

NEWCOMER_LEASES: Final = 4
NEWCOMERS_PART: Final = 8
"""A newcomer may hold an eighth of what it finds free, or four leases."""

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

LEAST_SHARE: Final = 0.08
"""A proven sampler that lies in a part b of its groups is found within 37 / b of them, 19 times in 20, and
after 12.5 / b on average. At 0.1 the honest run of ``bench.cheats`` at 40 versions spent 4.05 % of the
fleet's CPU time on checks, in proportion to their number."""

PROVEN_CHECKS: Final = 4
"""Checks after which a sampler is no newcomer; its share then falls as the cube of their number, since most
of what checks cost was samplers between the first check and the last share."""

FALSE_ALARM: Final = 0.01
LYING_SHARE: Final = 0.25
"""Share of differing groups that the bet wins most on."""


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
    """Winnings of a bet that it lies."""
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
        if allowance == self.allowance and not self.strikes:
            return self
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


def newcomers_leases(free: int) -> int:
    """Return how many leases a sampler may hold that never had one."""
    return max(NEWCOMER_LEASES, free // NEWCOMERS_PART)


def checked_share(checks: int, differing: int) -> float:
    """Return the share of a sampler's groups to check, when so many were and ``differing`` of them differed.

    Each difference, which a grader that is not deterministic may make, takes back the record of a newcomer.
    """
    record = checks - PROVEN_CHECKS * differing
    return max(LEAST_SHARE, min(1.0, (PROVEN_CHECKS / max(1, record)) ** 3))


def stake_after(stake: float, *, checks: int, differs: bool, noise_ratio: float) -> float:
    """Return the stake against a sampler after one more check.

    Args:
        checks: How many there were before.
        noise_ratio: Share of an honest sampler's groups that differ, at most; below ``LYING_SHARE``.
    """
    begins_now = 1.0 / ((checks + 1) * (checks + 2))
    if differs:
        odds = LYING_SHARE / noise_ratio if noise_ratio else math.inf
    else:
        odds = (1.0 - LYING_SHARE) / (1.0 - noise_ratio)
    return (stake + begins_now) * odds


def is_proof(stake: float) -> bool:
    return stake * FALSE_ALARM >= 1.0
