"""A confirming task of two tokens: say between which two numbers a quantity lies.

The quantity follows from eight features in an unknown and crooked way. The first token is the lower end, the
second how far the upper end is above it. Reward: 1 - width / 16 if the quantity lies between, else 0, so that
who knows little is paid for saying so.
"""

from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes, choice, crooked_features
from bench.staleness_lab.tasks import Completions

_FEATURES: Final = 8
_LEVELS: Final = 16
"""Lower ends, and widths from 0."""
_HIDDEN: Final = 24
_TRAINING: Final = 1024
_HELD_OUT: Final = 512
_SEED: Final = 43


class Intervals:
    """A perceptron 8-24, whose second output sees the first token too; untrained at the start."""

    groups, group_size, tokens = 4, 8, 2
    prompts = _TRAINING

    def __init__(self) -> None:
        count = _TRAINING + _HELD_OUT
        self._feature, rank = crooked_features(_SEED, count=count, features=_FEATURES)
        self._level = torch.from_numpy(rank * _LEVELS // count)  # even over all
        self.shapes = Shapes(
            {
                "hidden": (_FEATURES, _HIDDEN),
                "hidden_bias": (_HIDDEN,),
                "lower_embedding": (_LEVELS, _HIDDEN),
                "output_lower": (_HIDDEN, _LEVELS),
                "output_width": (_HIDDEN, _LEVELS),
            }
        )

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return untrained policies, close to uniform, [seeds, parameters]."""
        return self.shapes.untrained(seeds)

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Name G intervals for each prompt; ``uniform`` is [rows, n, G, 2]."""
        p, seen = self._seen(theta, prompt)
        of_lower = self._lower(p, seen).unsqueeze(2).expand(-1, -1, uniform.shape[2], -1)
        lower = choice(of_lower.exp(), uniform[..., 0])
        of_width = self._width(p, seen, lower)
        width = choice(of_width.exp(), uniform[..., 1])
        above = self._level[prompt].unsqueeze(-1) - lower
        holds = (above >= 0) & (above <= width)
        return Completions(
            token=torch.stack([lower, width], -1),
            mask=torch.ones_like(uniform, dtype=torch.bool),
            reward=torch.where(holds, 1 - width / _LEVELS, 0.0),
            log_probability=torch.stack([of_lower, of_width], -2),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, 2, 16]; the lower ends of a prompt share their distribution."""
        p, seen = self._seen(theta, prompt)
        of_width = self._width(p, seen, token[..., 0])
        return torch.stack([self._lower(p, seen).unsqueeze(2).expand_as(of_width), of_width], -2)

    def score(self, theta: Tensor) -> Tensor:
        """Return the expected reward of an interval for a prompt held out, [rows]."""
        held_out = torch.arange(_TRAINING, _TRAINING + _HELD_OUT).expand(len(theta), -1)
        every = torch.arange(_LEVELS)
        with torch.no_grad():
            p, seen = self._seen(theta, held_out)
            of_width = self._width(p, seen, every.expand(*held_out.shape, -1)).exp()
            above = self._level[held_out][..., None] - every  # [rows, n, lower ends]
            holds = (above >= 0).unsqueeze(-1) & (above.unsqueeze(-1) <= every)
            paid = (of_width * torch.where(holds, 1 - every / _LEVELS, 0.0)).sum(-1)
            return (self._lower(p, seen).exp() * paid).sum(-1).mean(1)

    def _seen(self, theta: Tensor, prompt: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the parameters by name, and what the hidden layer makes of the features, [rows, n, 24]."""
        p = self.shapes.views(theta)
        return p, torch.baddbmm(p["hidden_bias"].unsqueeze(1), self._feature[prompt], p["hidden"])

    def _lower(self, p: dict[str, Tensor], seen: Tensor) -> Tensor:
        """Return [rows, n, 16], nats."""
        return (seen.relu() @ p["output_lower"]).log_softmax(-1)

    def _width(self, p: dict[str, Tensor], seen: Tensor, lower: Tensor) -> Tensor:
        """Return [rows, n, G, 16], nats, after lower ends [rows, n, G]."""
        rows = torch.arange(len(lower)).view(-1, 1, 1)
        hidden = (seen.unsqueeze(2) + p["lower_embedding"][rows, lower]).relu()
        return (hidden @ p["output_width"].unsqueeze(1)).log_softmax(-1)
