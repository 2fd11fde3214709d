"""Made up fleets of which drift and mismatch are known, as the groups of one step after the other."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from learner.intake.divergence_panel import Estimate, Observed
from learner.intake.sampler_mismatch import Found, SamplerMismatches


def one(sampler: str, kl_nats: float, age: int = 0) -> Observed:
    return Observed(sampler, kl_nats, ((age, 1.0),))


class Watched(SamplerMismatches):
    """Mismatches, with a coordinator that does what they say."""

    def __init__(self, threshold_nats: float) -> None:
        super().__init__(threshold_nats)
        self.quarantined: dict[str, Estimate] = {}

    def see(self, groups: Sequence[Observed]) -> Found:
        found = self.observe(groups, quarantined=self.quarantined)
        self.quarantined |= found.beyond
        for name in found.content:
            del self.quarantined[name]
        return found


@dataclass(frozen=True)
class Fleet:
    """Samplers of which each delivers at ages of its own; groups are uneven by what they show."""

    ages: Sequence[tuple[int, int]]
    mismatch_nats: Sequence[float]
    drift_nats: float
    """At age 32."""
    power: float = 1.0
    unevenness: float = 0.35
    """Spread of a group's logarithm around its mean."""
    batch_groups: int = 24
    swing: float = 0.5
    """Relative spread of the drift over time: learning is not steady."""

    def drift(self, age: float) -> float:
        return self.drift_nats * math.pow(age / 32, self.power)

    def steps(self, seed: int, steps: int) -> Iterator[list[Observed]]:
        random = np.random.default_rng(seed)
        for step in range(steps):
            moved = 1 + self.swing * math.sin(step / 40)
            batch = []
            for sampler in random.integers(0, len(self.ages), self.batch_groups).tolist():
                first, last = self.ages[sampler]
                age = int(random.integers(first, last + 1))
                mean = moved * self.drift(age) + self.mismatch_nats[sampler]
                uneven = random.lognormal(-(self.unevenness**2) / 2, self.unevenness)
                batch.append(one(str(sampler), mean * uneven, age))
            yield batch
