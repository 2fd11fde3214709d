"""A report task of 64 tokens with a sparse reward: dial the three signs that open a safe, among 64 that
turn freely.

    safe 5    x x 2 x x ... x 0 x ... 3 x      reward 1 if the three places of this safe hold its own signs

Each safe has places and signs of its own, and the policy is a table: nothing learned of one helps with
another.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.staleness_lab.tables import TableTask

_SAFES: Final = 8
_SIGNS: Final = 4
_DECISIVE: Final = 3
_SEED: Final = 21


class Safes(TableTask):
    """A table by safe and place."""

    def __init__(self) -> None:
        super().__init__(prompts=_SAFES, tokens=64, choices=_SIGNS)
        rng = np.random.default_rng(_SEED)
        places = [np.sort(rng.choice(self.tokens, _DECISIVE, replace=False)) for _ in range(_SAFES)]
        self._place = torch.from_numpy(np.stack(places))
        self._right = torch.from_numpy(rng.integers(_SIGNS, size=(_SAFES, _DECISIVE)))

    def reward(self, token: Tensor, prompt: Tensor) -> Tensor:
        """Return 1 where the safe opens."""
        place = self._place[prompt].unsqueeze(2).expand(*token.shape[:3], -1)
        return (token.gather(-1, place) == self._right[prompt].unsqueeze(2)).all(-1).float()

    def score(self, theta: Tensor) -> Tensor:
        """Return the probability of opening a safe, mean over all, [rows]."""
        with torch.no_grad():
            safe = torch.arange(_SAFES)
            policy = self.policy(theta, safe.expand(len(theta), -1))
            decisive = policy[:, safe.unsqueeze(1), self._place]  # [rows, safes, decisive, signs]
            right = self._right.expand(len(theta), -1, -1).unsqueeze(-1)
            return decisive.gather(-1, right).squeeze(-1).sum(-1).exp().mean(1)
