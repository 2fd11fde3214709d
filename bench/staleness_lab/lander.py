"""A report task of up to 20 moves: land softly, by firing an engine or not.

A completion is a thrust for each move, none, half or full, until the ground is reached. Reward: 1 for
touching it at no speed, less in proportion to the speed, 0 from ``_HARDEST`` on and for whoever is still in
the air after 20 moves.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes, choice
from bench.staleness_lab.tasks import Completions

_MOVES: Final = 20
_THRUSTS: Final = 3
_HARDEST: Final = 1.0
_FEATURES: Final = 5
_HIDDEN: Final = 16
_TRAINING: Final = 1024
_HELD_OUT: Final = 128
_SEED: Final = 23
_DRAW_SEED: Final = 24


class Lander:
    """A perceptron that sees height, speed, gravity and what is left of the time; untrained at the start."""

    groups, group_size, tokens = 4, 8, _MOVES
    prompts = _TRAINING

    def __init__(self) -> None:
        rng = np.random.default_rng(_SEED)
        count = _TRAINING + _HELD_OUT
        self._height = torch.from_numpy(rng.uniform(3, 8, count)).float()
        self._speed = torch.from_numpy(rng.uniform(-1, 0.2, count)).float()
        self._gravity = torch.from_numpy(rng.uniform(0.15, 0.3, count)).float()
        self._uniform = torch.rand(
            1, _HELD_OUT, 1, self.tokens, generator=torch.Generator().manual_seed(_DRAW_SEED)
        )
        self.shapes = Shapes(
            {
                "hidden": (_FEATURES, _HIDDEN),
                "hidden_bias": (_HIDDEN,),
                "output": (_HIDDEN, _THRUSTS),
            }
        )

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return untrained policies, close to uniform, [seeds, parameters]."""
        return self.shapes.untrained(seeds)

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Fly to the ground; ``uniform`` is [rows, n, G, 20]."""
        height, speed = self._begun(prompt, uniform.shape[2])
        tokens, masks, policies = [], [], []
        for move in range(self.tokens):
            policy = self._policy(theta, prompt, height.unsqueeze(-1), speed.unsqueeze(-1), first=move)
            thrust = choice(policy.exp(), uniform[..., move, None]).squeeze(-1)
            tokens.append(thrust)
            masks.append(height > 0)
            policies.append(policy)
            height, speed = self._moved(prompt, height, speed, thrust)
        return Completions(
            token=torch.stack(tokens, -1),
            mask=torch.stack(masks, -1),
            reward=torch.where(height > 0, 0.0, (1 - speed.abs() / _HARDEST).clamp(min=0)),
            log_probability=torch.cat(policies, -2),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, 20, 3]."""
        height, speed = self._begun(prompt, token.shape[2])
        heights, speeds = [], []
        for thrust in token.unbind(-1):
            heights.append(height)
            speeds.append(speed)
            height, speed = self._moved(prompt, height, speed, thrust)
        return self._policy(theta, prompt, torch.stack(heights, -1), torch.stack(speeds, -1), first=0)

    def score(self, theta: Tensor) -> Tensor:
        """Return the mean reward of one flight from each place held out, always drawn alike, [rows]."""
        held_out = torch.arange(_TRAINING, _TRAINING + _HELD_OUT).expand(len(theta), -1)
        with torch.no_grad():
            flights = self.sample(theta, held_out, self._uniform.expand(len(theta), -1, -1, -1))
        return flights.reward.mean(dim=(1, 2))

    def _begun(self, prompt: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        """Return heights and speeds, [rows, n, G]."""
        shape = (*prompt.shape, group_size)
        height, speed = self._height[prompt], self._speed[prompt]
        return height.unsqueeze(-1).expand(shape), speed.unsqueeze(-1).expand(shape)

    def _moved(self, prompt: Tensor, height: Tensor, speed: Tensor, thrust: Tensor) -> tuple[Tensor, Tensor]:
        """Return heights and speeds after a move, [rows, n, G]; who has landed stays as he touched the
        ground."""
        gravity = self._gravity[prompt].unsqueeze(-1)
        after = speed + gravity * (thrust - 1)  # none: falls faster; half: keeps its speed; full: slows down
        is_flying = height > 0
        return torch.where(is_flying, height + after, height), torch.where(is_flying, after, speed)

    def _policy(self, theta: Tensor, prompt: Tensor, height: Tensor, speed: Tensor, *, first: int) -> Tensor:
        """Return [rows, n, G, t, 3], nats, from states [rows, n, G, t] before moves from ``first`` on."""
        left = (1 - torch.arange(first, first + height.shape[-1]) / _MOVES).expand_as(height)
        gravity = self._gravity[prompt][..., None, None].expand_as(height)
        features = torch.stack(
            [height / 8, speed, speed**2 / (4 * gravity * height.clamp(min=0.1)), 4 * gravity, left], -1
        ).clamp(-2, 2)
        p = self.shapes.views(theta)
        hidden = torch.baddbmm(p["hidden_bias"].unsqueeze(1), features.flatten(1, -2), p["hidden"]).relu()
        return (hidden @ p["output"]).view(*height.shape, _THRUSTS).log_softmax(-1)
