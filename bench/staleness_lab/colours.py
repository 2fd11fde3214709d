"""A confirming task of 16 tokens with a graded reward: colour the regions of a map.

    map 3    b a c a c b ...       reward 1 - clashes / 8, at least 0

Two neighbours of one colour clash. What a colour is worth depends on the colours of the others, no region
decides alone, and every map has several right answers. The policy is a table: nothing learned of one map
helps with another.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.staleness_lab.tables import TableTask

_MAPS: Final = 8
_REGIONS: Final = 16
_COLOURS: Final = 3
_BORDERS: Final = 28
_MOST_CLASHES: Final = 8
"""From here on a colouring is worth nothing; 28 / 3 is what colours drawn evenly have."""
_SCORED: Final = 16
"""Colourings of each map that a score is the mean of."""
_SEED: Final = 41
_DRAW_SEED: Final = 42


class Colours(TableTask):
    """A table by map and region."""

    def __init__(self) -> None:
        super().__init__(prompts=_MAPS, tokens=_REGIONS, choices=_COLOURS)
        rng = np.random.default_rng(_SEED)
        self._border = torch.from_numpy(np.stack([_borders(rng) for _ in range(_MAPS)]))
        self._uniform = torch.rand(
            1, _MAPS, _SCORED, self.tokens, generator=torch.Generator().manual_seed(_DRAW_SEED)
        )

    def reward(self, token: Tensor, prompt: Tensor) -> Tensor:
        """Return 1, less an eighth for each clash."""
        border = self._border[prompt].unsqueeze(2).expand(*token.shape[:3], -1, -1)
        one, other = (token.gather(-1, border[..., side]) for side in (0, 1))
        clashes = (one == other).sum(-1)
        return (1 - clashes / _MOST_CLASHES).clamp(min=0)

    def score(self, theta: Tensor) -> Tensor:
        """Return the mean reward of some colourings of each map, always drawn alike, [rows]."""
        everything = torch.arange(_MAPS).expand(len(theta), -1)
        with torch.no_grad():
            coloured = self.sample(theta, everything, self._uniform.expand(len(theta), -1, -1, -1))
        return coloured.reward.mean(dim=(1, 2))


def _borders(rng: np.random.Generator) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return pairs of neighbours, [borders, 2], of a map that three colours are enough for."""
    hidden = rng.permutation(np.arange(_REGIONS) % _COLOURS)
    pairs = [(a, b) for a in range(_REGIONS) for b in range(a) if hidden[a] != hidden[b]]
    return np.array([pairs[each] for each in rng.choice(len(pairs), _BORDERS, replace=False)])
