"""A report task with a graded reward: visit ten cities in an order that makes a short round trip.

A completion is the nine cities after the first. Reward: 2 - length / shortest length, at least 0, so that
every step along the way is paid for. The policy scores the cities not yet visited by what lies between.
"""

import itertools
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.staleness_lab.batched import Shapes, choice
from bench.staleness_lab.tasks import Completions

_CITIES: Final = 10
_FEATURES: Final = 6
_HIDDEN: Final = 24
_TRAINING: Final = 1024
_HELD_OUT: Final = 128
_SEED: Final = 10
_DRAW_SEED: Final = 11


class Routes:
    """A perceptron on six features of each candidate city, untrained at the start."""

    groups, group_size, steps, shifts = 4, 8, 1, False
    tokens = _CITIES - 1
    prompts = _TRAINING

    def __init__(self) -> None:
        place = np.random.default_rng(_SEED).random((_TRAINING + _HELD_OUT, _CITIES, 2))
        distance = np.linalg.norm(place[:, :, None] - place[:, None], axis=-1)
        self._distance = torch.from_numpy(distance).float()
        self._shortest = torch.from_numpy(shortest_round_trips(distance)).float()
        self._uniform = torch.rand(
            1, _HELD_OUT, 1, self.tokens, generator=torch.Generator().manual_seed(_DRAW_SEED)
        )
        self.shapes = Shapes(
            {
                "hidden": (_FEATURES, _HIDDEN),
                "hidden_bias": (_HIDDEN,),
                "output": (_HIDDEN, 1),
            }
        )

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return untrained policies, close to uniform, [seeds, parameters]."""
        theta = self.shapes.initial(seeds)
        self.shapes.views(theta)["output"].mul_(0.1)
        return theta

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Visit the cities one after the other; ``uniform`` is [rows, n, G, 9]."""
        distance = self._distance[prompt]
        at = torch.zeros(*uniform.shape[:3], 1, dtype=torch.int64)
        is_visited = torch.zeros(*uniform.shape[:3], 1, _CITIES, dtype=torch.bool)
        is_visited[..., 0] = True
        tokens, policies = [], []
        for step in range(self.tokens):
            policy = self._policy(theta, distance, at, is_visited)
            at = choice(policy.exp(), uniform[..., step, None])
            is_visited = is_visited.scatter(-1, at.unsqueeze(-1), True)
            tokens.append(at)
            policies.append(policy)
        token = torch.cat(tokens, -1)
        return Completions(
            token=token,
            mask=torch.ones_like(token, dtype=torch.bool),
            reward=self._reward(prompt, token),
            log_probability=torch.cat(policies, -2),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, 9, 10]; a city already visited has a logprob of -1e9."""
        at = torch.cat([torch.zeros_like(token[..., :1]), token[..., :-1]], -1)
        is_visited = torch.nn.functional.one_hot(at, _CITIES).cumsum(-2).bool()
        return self._policy(theta, self._distance[prompt], at, is_visited)

    def score(self, theta: Tensor) -> Tensor:
        """Return the mean reward of one tour through each held-out map, always drawn alike, [rows]."""
        held_out = torch.arange(_TRAINING, _TRAINING + _HELD_OUT).expand(len(theta), -1)
        with torch.no_grad():
            tours = self.sample(theta, held_out, self._uniform.expand(len(theta), -1, -1, -1))
        return tours.reward.mean(dim=(1, 2))

    def _reward(self, prompt: Tensor, token: Tensor) -> Tensor:
        tour = torch.cat([torch.zeros_like(token[..., :1]), token], -1)
        of_map = self._distance[prompt].flatten(2).unsqueeze(2).expand(*tour.shape[:3], -1)
        length = of_map.gather(-1, tour * _CITIES + tour.roll(-1, -1)).sum(-1)
        return (2 - length / self._shortest[prompt].unsqueeze(-1)).clamp(0, 1)

    def _policy(self, theta: Tensor, distance: Tensor, at: Tensor, is_visited: Tensor) -> Tensor:
        """Return log-distributions over the next city, [rows, n, G, t, cities], at places [rows, n, G, t]."""
        rows, prompts = distance.shape[:2]
        index = (torch.arange(rows)[:, None, None, None], torch.arange(prompts)[None, :, None, None])
        from_here = distance[*index, at]
        to_start = distance[:, :, None, None, 0].expand_as(from_here)
        is_open = ~is_visited
        left = is_open.sum(-1, keepdim=True)
        among_open = (is_open.float() @ distance[:, :, None]) / left  # mean distance to what is still open
        nearest = from_here.masked_fill(is_visited, 2.0).amin(-1, keepdim=True)
        features = [
            from_here,
            to_start,
            among_open,
            from_here - nearest,
            (from_here == nearest).float(),
            (left / _CITIES).expand_as(from_here),
        ]
        p = self.shapes.views(theta)
        flat = torch.stack(features, -1).flatten(1, -2)
        hidden = torch.baddbmm(p["hidden_bias"].unsqueeze(1), flat, p["hidden"]).relu()
        logits = (hidden @ p["output"]).view(from_here.shape)
        return logits.masked_fill(is_visited, -1e9).log_softmax(-1)


def shortest_round_trips(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the length of the shortest round trip of each map, [maps] from [maps, cities, cities].

    Source: Held and Karp, SIAM Journal on Applied Mathematics 10 (1962).
    """
    cities = distance.shape[1]
    others = range(1, cities)
    shortest = {(frozenset((c,)), c): distance[:, 0, c] for c in others}
    for size in range(2, cities):
        for visited in map(frozenset, itertools.combinations(others, size)):
            for last in visited:
                before = visited - {last}
                ways = [shortest[before, c] + distance[:, c, last] for c in before]
                shortest[visited, last] = np.minimum.reduce(ways)
    whole = frozenset(others)
    home: NDArray[np.float64] = np.minimum.reduce([shortest[whole, c] + distance[:, c, 0] for c in others])
    return home
