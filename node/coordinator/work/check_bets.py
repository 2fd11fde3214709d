"""How many of a sampler's groups are checked, and what differing rewards prove; pure.

Where the grader is deterministic, one group with other rewards is proof. Where honest samplers may differ in
a share of their groups, checks are bets against "it differs no more often than that": the stake grows by
``LYING_SHARE`` over that share with each difference, shrinks a little with each agreement, and is spread over
all moments at which a sampler may begin to lie. An honest sampler's stake reaches 1 / ``FALSE_ALARM`` in a
whole run with probability ``FALSE_ALARM`` at most (Ville's inequality).
"""

import math
from typing import Final

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
