"""SFPO: several fast steps on one batch, a reposition towards the start, one slow step.

    theta_0 --fast--> ... --fast--> theta_K ;  theta = theta_0 + a (theta_K - theta_0) ;  --slow--> theta'

Works around any objective and optimizer; only the last parameters are a version.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def slow_fast_step(
    parameters: Sequence[Tensor], step: Callable[[], None], *, fast_steps: int, reposition_share: float
) -> None:
    """Take ``fast_steps`` + 1 steps, repositioned before the last.

    Args:
        parameters: changed in place by ``step`` and by the reposition.
        step: takes one step of the optimizer on the batch.
        fast_steps: K >= 1.
        reposition_share: a, see ``reposition``.

    Source: arXiv:2510.04072, algorithm 1.
    """
    start = [parameter.detach().clone() for parameter in parameters]
    for _ in range(fast_steps):
        step()
    reposition(parameters, start, share=reposition_share)
    step()


def reposition(parameters: Sequence[Tensor], start: Sequence[Tensor], *, share: float) -> None:
    """Set each parameter to start + share * (parameter - start).

    Args:
        parameters: changed in place.
        start: what they were.
        share: in [0, 1]; 1 stays where the fast steps led.
    """
    with torch.no_grad():
        for parameter, origin in zip(parameters, start, strict=True):
            parameter.copy_(torch.lerp(origin, parameter, share))
