"""A learner's online estimate of divergence by age: KL(behaviour || learner) a token and version of lag."""

from typing import Final

import torch
from torch import Tensor

_MEMORY: Final = 0.9
"""Share of the sums that a version keeps: an estimate is made of the last ten or so."""

_HELD_NATS: Final = 2.0


class Drift:
    """A slope for each seed: measured divergence over the lag it was measured at, from past versions only."""

    def __init__(self, seeds: int) -> None:
        self._nats = torch.zeros(seeds, dtype=torch.float64)
        self._versions = torch.zeros(seeds, dtype=torch.float64)

    def expected(self, lag: Tensor) -> Tensor | None:
        """Return nats a token for each lag, [seeds, groups]; None until a seed's lag was above 0."""
        if not bool((self._versions > 0).all()):
            return None
        return (self._nats / self._versions).unsqueeze(1) * lag

    def add(self, lag: Tensor, log_ratio: Tensor, mask: Tensor) -> None:
        """Take what groups of these lags [seeds, groups] showed.

        Args:
            lag: [seeds, groups], versions.
            log_ratio: [seeds, n, t], nats, log p/q. Half the mean square estimates KL where p is near q; an
                outlier counts as ``_HELD_NATS``.
            mask: [seeds, n, t]
        """
        squares = torch.where(mask, log_ratio.clamp(-_HELD_NATS, _HELD_NATS), 0.0).square().sum(2) / 2
        of_groups = (*lag.shape, -1)
        divergence = squares.view(of_groups).sum(2) / mask.sum(2).view(of_groups).sum(2)
        is_old = lag > 0
        self._nats = _MEMORY * self._nats + torch.where(is_old, divergence, 0.0).sum(1)
        self._versions = _MEMORY * self._versions + lag.sum(1)
