"""SFPO: several fast steps on one batch, a reposition towards the start, one slow step.

    theta_0 --fast--> ... --fast--> theta_K ;  theta = theta_0 + a (theta_K - theta_0) ;  --slow--> theta'

Works around any objective and optimizer; only the last parameters are a version.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Final

import torch
from torch import Tensor

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


def slow_fast_step(
    parameters: Sequence[Tensor], step: Callable[[], None], *, fast_steps: int, reposition_share: float
) -> None:
    """Do K = ``fast_steps`` >= 1 steps, a reposition and one more; all change ``parameters`` in place.

    Source: arXiv:2510.04072, algorithm 1.
    """
    start = [parameter.detach().clone() for parameter in parameters]
    for _ in range(fast_steps):
        step()
    reposition(parameters, start, share=reposition_share)
    step()


def reposition(parameters: Sequence[Tensor], start: Sequence[Tensor], *, share: float) -> None:
    """Set each parameter to start + share * (parameter - start), in place; a share of 1 changes nothing."""
    with torch.no_grad():
        for parameter, origin in zip(parameters, start, strict=True):
            parameter.copy_(torch.lerp(origin, parameter, share))
