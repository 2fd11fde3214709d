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

from bench.staleness_lab.batched import Shapes
from bench.staleness_lab.tasks import Completions

_SAFES: Final = 8
_SIGNS: Final = 4
_DECISIVE: Final = 3
_SEED: Final = 21


class Safes:
    """A table of logits, by safe and place; all but uniform at the start."""

    groups, group_size, tokens = 4, 8, 64
    prompts = _SAFES

    def __init__(self) -> None:
        rng = np.random.default_rng(_SEED)
        places = [np.sort(rng.choice(self.tokens, _DECISIVE, replace=False)) for _ in range(_SAFES)]
        self._place = torch.from_numpy(np.stack(places))
        self._right = torch.from_numpy(rng.integers(_SIGNS, size=(_SAFES, _DECISIVE)))
        self.shapes = Shapes({"output": (_SAFES, self.tokens * _SIGNS)})

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return untrained policies, close to uniform, [seeds, parameters]."""
        return 0.3 * self.shapes.initial(seeds)

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Draw every place at once; ``uniform`` is [rows, n, G, T]."""
        policy = self._policy(theta, prompt)
        cumulative = policy.exp().cumsum(-1)[:, :, None]  # [rows, n, 1, T, signs]
        token = (uniform.unsqueeze(-1) >= cumulative[..., :-1]).sum(-1)
        place = self._place[prompt].unsqueeze(2).expand(*token.shape[:3], -1)
        is_open = (token.gather(-1, place) == self._right[prompt].unsqueeze(2)).all(-1)
        return Completions(
            token=token,
            mask=torch.ones_like(token, dtype=torch.bool),
            reward=is_open.float(),
            log_probability=policy.unsqueeze(2).expand(*token.shape, -1),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, T, signs]; the completions of a safe share their distributions."""
        return self._policy(theta, prompt).unsqueeze(2).expand(*token.shape, -1)

    def score(self, theta: Tensor) -> Tensor:
        """Return the probability of opening a safe, mean over all, [rows]."""
        with torch.no_grad():
            safe = torch.arange(_SAFES)
            policy = self._policy(theta, safe.expand(len(theta), -1))
            decisive = policy[:, safe.unsqueeze(1), self._place]  # [rows, safes, decisive, signs]
            right = self._right.expand(len(theta), -1, -1).unsqueeze(-1)
            return decisive.gather(-1, right).squeeze(-1).sum(-1).exp().mean(1)

    def _policy(self, theta: Tensor, prompt: Tensor) -> Tensor:
        """Return [rows, n, T, signs], nats."""
        table = self.shapes.views(theta)["output"]
        logits = table[torch.arange(len(theta)).unsqueeze(1), prompt]
        return logits.view(*prompt.shape, self.tokens, _SIGNS).log_softmax(-1)
