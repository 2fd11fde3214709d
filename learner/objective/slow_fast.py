"""SFPO around any objective: several fast steps on a batch, a reposition towards the start, one slow step.

    theta_0 --fast--> ... --fast--> theta_K ;  theta = theta_0 + a (theta_K - theta_0) ;  --slow--> theta'

Works around any objective and optimizer; only the last parameters are a version.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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
