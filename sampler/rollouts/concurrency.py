"""Decides how many groups to generate at once, so that the engine is full and its queue short; pure.

    mean use of the engine        groups at once
    --------------------------    ---------------------------------------
    below both bands              more, at most ``GROWTH`` times as many
    in a band, above neither      as many
    above a band                  fewer, at least 1 / ``GROWTH`` of them

A change shows only once the groups begun since are finished, and a group uses more memory the longer it runs.
So a decision rests on the mean since the last one, over the time that a group takes at least. It aims at the
middle of the band, as if use grew in proportion to the groups: with one more each time, a GPU that holds a
hundred groups would be full after a hundred times as long as a group takes.
"""

import math
from dataclasses import dataclass
from typing import Final

from node.values.limits import LEASES_PER_PEER
from sampler.engines.engine import EngineUse


@dataclass(frozen=True, slots=True)
class _Band:
    """Between ``low`` and ``high`` the number of groups is kept."""

    low: float
    high: float

    def fullness(self, share: float) -> float:
        """Return ``share`` in units of the middle."""
        return 2 * share / (self.low + self.high)


CACHE: Final = _Band(0.6, 0.9)
"""Band of ``EngineUse.cache_share``. The rest is for completions to grow into: where the cache is full, vLLM
drops completions from it and computes their keys and values again later."""

ASKED: Final = _Band(0.9, 1.25)
"""Band of ``EngineUse.asked_share``. Below, the engine draws fewer completions than it could; above, a group
waits in it for more than a quarter of the time in which it is drawn, and gets staler."""

PLAIN_ASKED: Final = 1.5
"""Above this the engine is too full beyond doubt, even where it was seen for the time of one group only."""

GROWTH: Final = 2.0
"""Most that one decision changes the number by, as in TCP's slow start."""

FIRST_GROUPS: Final = 8
"""Groups at once until some are finished."""

MEASURED_GROUPS: Final = 32
MEASURED_ROUNDS: Final = 2
"""How many groups, and how many after each other, a mean is over. In the simulation (20 groups at once, 64
completions drawn at once, lengths from 5 to 100 tokens) what is asked for then has a standard deviation of
.04, a ninth of its band."""

SHORTEST_ROUND_S: Final = 1.0
"""Ten readings, where a group takes less."""


class Concurrency:
    """Follows an engine from reading to reading; ``now`` is monotonic, seconds.

    Attributes:
        groups: How many to generate at once, from 1 to ``LEASES_PER_PEER``.
    """

    def __init__(self, *, now: float) -> None:
        self.groups = FIRST_GROUPS
        self.begin(now=now)

    def begin(self, *, now: float) -> None:
        """Forget what was read so far."""
        self._since_s = now
        self._readings = self._held_back = 0
        self._cache_sum = self._asked_sum = 0.0

    def note(self, use: EngineUse, *, is_held_back: bool, group_s: float | None, now: float) -> bool:
        """Note a reading, one of many at even intervals; decide if it is time, and return whether it was.

        Args:
            is_held_back: Whether something else than the number keeps the engine empty, such as a hub that
                grants fewer leases, or slow graders. Where that is so half of the time, the number is not
                raised: so many groups would all come when it ends.
            group_s: How long a group takes in the engine; None: no group was finished yet.
        """
        self._readings += 1
        self._cache_sum += use.cache_share
        self._asked_sum += use.asked_share
        self._held_back += is_held_back
        if group_s is None:
            return False
        rounds = (now - self._since_s) / max(group_s, SHORTEST_ROUND_S)
        mean = EngineUse(self._cache_sum / self._readings, self._asked_sum / self._readings)
        is_measured = rounds >= max(MEASURED_ROUNDS, MEASURED_GROUPS / self.groups)
        is_decided = is_measured or (rounds >= 1 and _is_plain(mean))
        if is_decided:
            self.groups = self._next(mean)
            self.begin(now=now)
        return is_decided

    def _next(self, mean: EngineUse) -> int:
        aim = self.groups / min(max(_fullness(mean), 1 / GROWTH), GROWTH)
        if mean.cache_share > CACHE.high or mean.asked_share > ASKED.high:
            return max(1, min(math.ceil(aim), self.groups - 1))
        is_held_back = 2 * self._held_back >= self._readings
        if is_held_back or mean.cache_share >= CACHE.low or mean.asked_share >= ASKED.low:
            return self.groups
        # Where few groups fill the engine, one more may be too many.
        one_more = (self.groups + 1) / self.groups
        fits = mean.cache_share * one_more <= CACHE.high and mean.asked_share * one_more <= ASKED.high
        return min(max(int(aim), self.groups + fits), LEASES_PER_PEER)


def _fullness(mean: EngineUse) -> float:
    return max(CACHE.fullness(mean.cache_share), ASKED.fullness(mean.asked_share))


def _is_plain(mean: EngineUse) -> bool:
    """Return whether a mean over one group's time says enough: the engine is half empty, or far too full."""
    return _fullness(mean) <= 1 / GROWTH or mean.cache_share > CACHE.high or mean.asked_share > PLAIN_ASKED
