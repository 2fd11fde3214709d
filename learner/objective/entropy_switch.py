"""When SFPO's fast steps end; without torch: the journal and commands that read it know the switch."""

from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Final

_LEAST_DEVIATION: Final = 1e-9
"""Added to a deviation of entropies, so that equal ones have a score of 0."""


@dataclass(frozen=True, slots=True)
class EntropySwitch:
    """Decide whether fast steps are still taken: until the policy's entropy jumps, and then never again.

    Fast steps help while a policy is still far from what it will be; reusing a batch late in training
    drives it apart. The newest of the last ``window`` entropies is compared with their mean and standard
    deviation (divisor: window).

    Source: SFPO, arXiv:2510.04072, section 3; numbers and the direction of its authors' code.
    """

    window: int = 30
    """Steps, >= 2."""
    threshold: float = 1.0
    """Standard deviations above the mean."""
    entropies: tuple[float, ...] = ()
    """Entropies of the last steps, oldest first, at most ``window``; nats a token."""
    is_on: bool = True

    def observe(self, entropy: float) -> "EntropySwitch":
        """Return the switch after a step whose policy had this entropy."""
        entropies = (*self.entropies, entropy)[-self.window :]
        seen = replace(self, entropies=entropies)
        return replace(seen, is_on=self.is_on and not seen.score >= self.threshold)

    @property
    def score(self) -> float:
        """Deviations of the newest entropy above the window's mean; 0 until the window is full."""
        if len(self.entropies) < self.window:
            return 0.0
        return (self.entropies[-1] - fmean(self.entropies)) / (pstdev(self.entropies) + _LEAST_DEVIATION)
