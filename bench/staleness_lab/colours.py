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

from bench.staleness_lab.batched import Shapes
from bench.staleness_lab.tasks import Completions

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


class Colours:
    """A table of logits, by map and region; all but uniform at the start."""

    groups, group_size, tokens = 4, 8, _REGIONS
    prompts = _MAPS

    def __init__(self) -> None:
        rng = np.random.default_rng(_SEED)
        self._border = torch.from_numpy(np.stack([_borders(rng) for _ in range(_MAPS)]))
        self._uniform = torch.rand(
            1, _MAPS, _SCORED, self.tokens, generator=torch.Generator().manual_seed(_DRAW_SEED)
        )
        self.shapes = Shapes({"output": (_MAPS, self.tokens * _COLOURS)})

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return untrained policies, close to uniform, [seeds, parameters]."""
        return 0.3 * self.shapes.initial(seeds)

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Colour every region at once; ``uniform`` is [rows, n, G, T]."""
        policy = self._policy(theta, prompt)
        cumulative = policy.exp().cumsum(-1)[:, :, None]  # [rows, n, 1, T, colours]
        token = (uniform.unsqueeze(-1) >= cumulative[..., :-1]).sum(-1)
        border = self._border[prompt].unsqueeze(2).expand(*token.shape[:3], -1, -1)
        one, other = (token.gather(-1, border[..., side]) for side in (0, 1))
        clashes = (one == other).sum(-1)
        return Completions(
            token=token,
            mask=torch.ones_like(token, dtype=torch.bool),
            reward=(1 - clashes / _MOST_CLASHES).clamp(min=0),
            log_probability=policy.unsqueeze(2).expand(*token.shape, -1),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, T, colours]; the completions of a map share their distributions."""
        return self._policy(theta, prompt).unsqueeze(2).expand(*token.shape, -1)

    def score(self, theta: Tensor) -> Tensor:
        """Return the mean reward of some colourings of each map, always drawn alike, [rows]."""
        everything = torch.arange(_MAPS).expand(len(theta), -1)
        with torch.no_grad():
            coloured = self.sample(theta, everything, self._uniform.expand(len(theta), -1, -1, -1))
        return coloured.reward.mean(dim=(1, 2))

    def _policy(self, theta: Tensor, prompt: Tensor) -> Tensor:
        """Return [rows, n, T, colours], nats."""
        table = self.shapes.views(theta)["output"]
        logits = table[torch.arange(len(theta)).unsqueeze(1), prompt]
        return logits.view(*prompt.shape, self.tokens, _COLOURS).log_softmax(-1)


def _borders(rng: np.random.Generator) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return pairs of neighbours, [borders, 2], of a map that three colours are enough for."""
    hidden = rng.permutation(np.arange(_REGIONS) % _COLOURS)
    pairs = [(a, b) for a in range(_REGIONS) for b in range(a) if hidden[a] != hidden[b]]
    return np.array([pairs[each] for each in rng.choice(len(pairs), _BORDERS, replace=False)])
