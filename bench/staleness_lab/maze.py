"""A report task with a sparse reward: find the way through a maze that is seen one cell around only.

A completion is up to 20 moves; it ends at the goal, which alone is rewarded. The policy sees the walls around
it, where the goal lies and its last move.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes, choice
from bench.staleness_lab.tasks import Completions

_SIDE: Final = 9
"""Cells, of which the outermost are walls."""
_WALL_SHARE: Final = 0.25
_NEAREST: Final = 4
"""Moves between start and goal, as the crow flies along the grid, at least."""
_MOVES: Final = 20
_FEATURES: Final = 15
_HIDDEN: Final = 32
_TRAINING: Final = 1024
_HELD_OUT: Final = 256
_SEED: Final = 12
_DRAW_SEED: Final = 13
_STEP: Final = torch.tensor([-_SIDE, _SIDE, -1, 1])
"""Up, down, left, right, in the numbering of cells row by row."""
_AROUND: Final = torch.tensor([-_SIDE - 1, -_SIDE, -_SIDE + 1, -1, 1, _SIDE - 1, _SIDE, _SIDE + 1])


class Maze:
    """A perceptron with no memory but its last move, untrained at the start."""

    groups, group_size, steps, shifts = 4, 8, 1, False
    tokens = _MOVES
    prompts = _TRAINING

    def __init__(self) -> None:
        walls, starts, goals = _mazes(np.random.default_rng(_SEED), _TRAINING + _HELD_OUT)
        self._wall, self._start, self._goal = walls, starts, goals
        self._uniform = torch.rand(
            1, _HELD_OUT, 1, self.tokens, generator=torch.Generator().manual_seed(_DRAW_SEED)
        )
        self.shapes = Shapes(
            {
                "hidden": (_FEATURES, _HIDDEN),
                "hidden_bias": (_HIDDEN,),
                "output": (_HIDDEN, len(_STEP)),
            }
        )

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return untrained policies, close to uniform, [seeds, parameters]."""
        theta = self.shapes.initial(seeds)
        self.shapes.views(theta)["output"].mul_(0.1)
        return theta

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Walk until the goal; ``uniform`` is [rows, n, G, 20]."""
        goal = self._goal[prompt].unsqueeze(-1)
        at = self._start[prompt].unsqueeze(-1).expand(uniform.shape[:3])
        last = torch.zeros_like(at)
        is_open = at != goal
        tokens, masks, policies = [], [], []
        for step in range(self.tokens):
            policy = self._policy(theta, prompt, at.unsqueeze(-1), last.unsqueeze(-1))
            last = choice(policy.exp(), uniform[..., step, None]).squeeze(-1)
            at = torch.where(is_open, self._moved(prompt, at, last), at)
            tokens.append(last)
            masks.append(is_open)
            policies.append(policy)
            is_open = is_open & (at != goal)
        return Completions(
            token=torch.stack(tokens, -1),
            mask=torch.stack(masks, -1),
            reward=(at == goal).float(),
            log_probability=torch.cat(policies, -2),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, 20, 4]."""
        at = self._start[prompt].unsqueeze(-1).expand(token.shape[:3])
        places = []
        for move in token.unbind(-1):
            places.append(at)
            at = self._moved(prompt, at, move)
        last = torch.cat([torch.zeros_like(token[..., :1]), token[..., :-1]], -1)
        return self._policy(theta, prompt, torch.stack(places, -1), last)

    def score(self, theta: Tensor) -> Tensor:
        """Return the share of held-out mazes solved, one walk each, always drawn alike, [rows]."""
        held_out = torch.arange(_TRAINING, _TRAINING + _HELD_OUT).expand(len(theta), -1)
        with torch.no_grad():
            walks = self.sample(theta, held_out, self._uniform.expand(len(theta), -1, -1, -1))
        return walks.reward.mean(dim=(1, 2))

    def _moved(self, prompt: Tensor, at: Tensor, move: Tensor) -> Tensor:
        """Return where a move leads: [rows, n, G]; into a wall, nowhere."""
        there = at + _STEP[move]
        return torch.where(self._wall[prompt.unsqueeze(-1), there], at, there)

    def _policy(self, theta: Tensor, prompt: Tensor, at: Tensor, last: Tensor) -> Tensor:
        """Return [rows, n, G, t, 4], nats, from places and last moves [rows, n, G, t]."""
        goal = self._goal[prompt][..., None, None].expand_as(at)
        around = self._wall[prompt[..., None, None, None], at.unsqueeze(-1) + _AROUND].float()
        down = (goal // _SIDE - at // _SIDE).float()
        right = (goal % _SIDE - at % _SIDE).float()
        lies = torch.stack([down.sign(), right.sign(), (down.abs() - right.abs()) / _SIDE], -1)
        features = torch.cat([around, lies, torch.nn.functional.one_hot(last, len(_STEP))], -1)
        p = self.shapes.views(theta)
        flat = features.flatten(1, -2)
        hidden = torch.baddbmm(p["hidden_bias"].unsqueeze(1), flat, p["hidden"]).relu()
        return (hidden @ p["output"]).view(*at.shape, len(_STEP)).log_softmax(-1)


def _mazes(rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return walls [count, cells], starts and goals [count], of mazes whose goal can be reached in time."""
    found: list[tuple[Any, ...]] = []
    while len(found) < count:
        wall = np.ones((_SIDE, _SIDE), dtype=bool)
        wall[1:-1, 1:-1] = rng.random((_SIDE - 2, _SIDE - 2)) < _WALL_SHARE
        start, goal = rng.choice(np.flatnonzero(~wall), 2, replace=False)
        away = abs(start // _SIDE - goal // _SIDE) + abs(start % _SIDE - goal % _SIDE)
        if away >= _NEAREST and _is_reachable(wall, int(start), int(goal)):
            found.append((wall.ravel(), start, goal))
    walls, starts, goals = zip(*found, strict=True)
    return tuple(torch.from_numpy(np.array(each)) for each in (walls, starts, goals))  # type: ignore[return-value]


def _is_reachable(wall: np.ndarray[tuple[int, int], np.dtype[np.bool_]], start: int, goal: int) -> bool:
    reached = np.zeros(wall.size, dtype=bool)
    reached[start] = True
    for _ in range(_MOVES - 4):
        at = np.flatnonzero(reached)
        for step in _STEP.tolist():
            reached[at + step] = True
        reached &= ~wall.ravel()
    return bool(reached[goal])
