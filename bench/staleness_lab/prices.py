"""A report task of one token with a cliff: name a price; too much, and nothing is sold.

A customer has eight features, from which follows the most that he would pay, in an unknown and crooked way.
Reward: the price over that, 0 for a price above it.
"""

from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes, choice, crooked_features
from bench.staleness_lab.tasks import Completions

_FEATURES: Final = 8
_PRICES: Final = 16
_HIDDEN: Final = 24
_TRAINING: Final = 1024
_HELD_OUT: Final = 512
_SEED: Final = 22


class Prices:
    """A perceptron 8-24-16 over sixteen prices, untrained at the start."""

    groups, group_size, tokens = 8, 8, 1
    prompts = _TRAINING

    def __init__(self) -> None:
        count = _TRAINING + _HELD_OUT
        self._feature, rank = crooked_features(_SEED, count=count, features=_FEATURES)
        self._most = torch.from_numpy(0.2 + 0.8 * (rank / count)).float()  # even over all customers
        self._price = torch.arange(1, _PRICES + 1) / _PRICES
        self.shapes = Shapes(
            {
                "hidden": (_FEATURES, _HIDDEN),
                "hidden_bias": (_HIDDEN,),
                "output": (_HIDDEN, _PRICES),
                "output_bias": (_PRICES,),
            }
        )

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return untrained policies, close to uniform, [seeds, parameters]."""
        return self.shapes.untrained(seeds)

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Name G prices to each customer; ``uniform`` is [rows, n, G, 1]."""
        each = self._policy(theta, prompt).unsqueeze(2).expand(-1, -1, uniform.shape[2], -1)
        token = choice(each.exp(), uniform.squeeze(-1))
        return Completions(
            token=token.unsqueeze(-1),
            mask=torch.ones_like(uniform, dtype=torch.bool),
            reward=self._paid(prompt).gather(-1, token),
            log_probability=each.unsqueeze(3),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, 1, 16]; every price to a customer shares its distribution."""
        return self._policy(theta, prompt)[:, :, None, None].expand(-1, -1, token.shape[2], -1, -1)

    def score(self, theta: Tensor) -> Tensor:
        """Return the expected reward of a price to a customer held out, [rows]."""
        held_out = torch.arange(_TRAINING, _TRAINING + _HELD_OUT).expand(len(theta), -1)
        with torch.no_grad():
            return (self._policy(theta, held_out).exp() * self._paid(held_out)).sum(-1).mean(1)

    def _paid(self, prompt: Tensor) -> Tensor:
        """Return [rows, n, prices]: what each price would bring."""
        share = self._price / self._most[prompt].unsqueeze(-1)
        return torch.where(share <= 1, share, 0.0)

    def _policy(self, theta: Tensor, prompt: Tensor) -> Tensor:
        """Return [rows, n, prices], nats."""
        p = self.shapes.views(theta)
        hidden = torch.baddbmm(p["hidden_bias"].unsqueeze(1), self._feature[prompt], p["hidden"]).relu()
        return torch.baddbmm(p["output_bias"].unsqueeze(1), hidden, p["output"]).log_softmax(-1)
