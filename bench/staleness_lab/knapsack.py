"""A report task with a cliff: fill a knapsack item by item; one item too many, and all is lost.

A completion is a decision for each of 24 items, in the order they come; it ends when the sack bursts. Reward:
the value taken over the most that fits, 0 for a sack that burst.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.staleness_lab.batched import Shapes, choice
from bench.staleness_lab.tasks import Completions

_ITEMS: Final = 24
_HEAVIEST: Final = 20
_CAPACITY_SHARE: Final = 0.4
"""Share of the weight of all items: taking every other one bursts most sacks."""
_FEATURES: Final = 6
_HIDDEN: Final = 24
_TRAINING: Final = 1024
_HELD_OUT: Final = 256
_SEED: Final = 14
_DRAW_SEED: Final = 15


class Knapsack:
    """A perceptron that sees the item, the room left and what is still to come; untrained at the start."""

    groups, group_size, steps, shifts = 4, 8, 1, False
    tokens = _ITEMS
    prompts = _TRAINING

    def __init__(self) -> None:
        rng = np.random.default_rng(_SEED)
        weight = rng.integers(1, _HEAVIEST + 1, (_TRAINING + _HELD_OUT, _ITEMS))
        value = weight * rng.uniform(0.4, 1.6, weight.shape)
        capacity = (_CAPACITY_SHARE * weight.sum(1)).astype(np.int64)
        self._most = torch.from_numpy(most_value(weight, value, capacity)).float()
        self._weight = torch.from_numpy(weight).float()
        self._value = torch.from_numpy(value).float()
        self._capacity = torch.from_numpy(capacity).float()
        self._uniform = torch.rand(
            1, _HELD_OUT, 1, self.tokens, generator=torch.Generator().manual_seed(_DRAW_SEED)
        )
        self.shapes = Shapes(
            {
                "hidden": (_FEATURES, _HIDDEN),
                "hidden_bias": (_HIDDEN,),
                "output": (_HIDDEN, 2),
            }
        )

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return untrained policies, close to uniform, [seeds, parameters]."""
        theta = self.shapes.initial(seeds)
        self.shapes.views(theta)["output"].mul_(0.1)
        return theta

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Leave (0) or take (1) each item; ``uniform`` is [rows, n, G, 24]."""
        room = self._capacity[prompt].unsqueeze(-1).expand(uniform.shape[:3])
        tokens, masks, policies = [], [], []
        for step in range(self.tokens):
            policy = self._policy(theta, prompt, room.unsqueeze(-1), first=step)
            taken = choice(policy.exp(), uniform[..., step, None]).squeeze(-1)
            tokens.append(taken)
            masks.append(room >= 0)
            policies.append(policy)
            room = torch.where(room >= 0, room - taken * self._weight[prompt, step].unsqueeze(-1), room)
        token = torch.stack(tokens, -1)
        value = (token * self._value[prompt].unsqueeze(2)).sum(-1)
        return Completions(
            token=token,
            mask=torch.stack(masks, -1),
            reward=torch.where(room >= 0, value / self._most[prompt].unsqueeze(-1), 0.0).clamp(max=1.0),
            log_probability=torch.cat(policies, -2),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, 24, 2]."""
        taken = token * self._weight[prompt].unsqueeze(2)
        before = taken.cumsum(-1) - taken
        return self._policy(theta, prompt, self._capacity[prompt][..., None, None] - before, first=0)

    def score(self, theta: Tensor) -> Tensor:
        """Return the mean reward of one sack for each held-out set of items, always drawn alike, [rows]."""
        held_out = torch.arange(_TRAINING, _TRAINING + _HELD_OUT).expand(len(theta), -1)
        with torch.no_grad():
            sacks = self.sample(theta, held_out, self._uniform.expand(len(theta), -1, -1, -1))
        return sacks.reward.mean(dim=(1, 2))

    def _policy(self, theta: Tensor, prompt: Tensor, room: Tensor, *, first: int) -> Tensor:
        """Return [rows, n, G, t, 2], nats, from the room [rows, n, G, t] before items from ``first`` on."""
        items = slice(first, first + room.shape[-1])
        weight = self._weight[prompt]
        to_come = weight.flip(-1).cumsum(-1).flip(-1)[..., items].unsqueeze(2)
        capacity = self._capacity[prompt][..., None, None]
        weight, value = weight[..., items].unsqueeze(2), self._value[prompt][..., items].unsqueeze(2)
        features = torch.stack(
            [
                (weight / _HEAVIEST).expand_as(room),
                (value / weight).expand_as(room),
                (weight <= room).float(),
                weight / room.clamp(min=1.0),
                room.clamp(min=0.0) / to_come,
                room.clamp(min=0.0) / capacity,
            ],
            -1,
        ).clamp(max=2.0)
        p = self.shapes.views(theta)
        hidden = torch.baddbmm(p["hidden_bias"].unsqueeze(1), features.flatten(1, -2), p["hidden"]).relu()
        return (hidden @ p["output"]).view(*room.shape, 2).log_softmax(-1)


def most_value(
    weight: NDArray[np.int64], value: NDArray[np.float64], capacity: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the most that fits into each sack, [sacks] from weights and values [sacks, items]."""
    best = np.zeros((len(weight), int(capacity.max()) + 1))  # by the weight allowed
    allowed = np.arange(best.shape[1])
    for item_weight, item_value in zip(weight.T, value.T, strict=True):
        without = allowed[None] - item_weight[:, None]
        taken = np.take_along_axis(best, without.clip(min=0), 1) + item_value[:, None]
        best = np.maximum(best, np.where(without >= 0, taken, 0.0))
    most: NDArray[np.float64] = np.take_along_axis(best, capacity[:, None], 1)[:, 0]
    return most
