"""Design tasks of any length: four places of a completion decide, the others may hold anything.

    prompt 7    x x 3 x x x 0 x x 1 ...     reward 1 if all four decisive places hold the prompt's own signs

A place's distribution depends on the prompt and the place, not on what was written before, so that 512
tokens cost little. The difficulty is the same at every length; what grows is the noise that a sequence's
ratio collects.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes, warm_start
from bench.staleness_lab.tasks import Completions

_SIGNS: Final = 8
_DECISIVE: Final = 4
_WIDTH: Final = 16
_WARM_SCORE: Final = 0.1
_SEED: Final = 8


class Codes:
    """A factorised policy: embeddings of prompt and place, a nonlinearity, eight signs."""

    group_size = 8
    prompts = 8
    shifts = False

    def __init__(self, tokens: int, *, groups: int = 4, steps: int = 1) -> None:
        self.tokens, self.groups, self.steps = tokens, groups, steps
        rng = np.random.default_rng([_SEED, tokens])
        self._place = torch.from_numpy(np.sort(rng.choice(tokens, _DECISIVE, replace=False)))
        self._right = torch.from_numpy(rng.integers(_SIGNS, size=(self.prompts, _DECISIVE)))
        self.shapes = Shapes(
            {
                "prompt_embedding": (self.prompts, _WIDTH),
                "place_embedding": (tokens, _WIDTH),
                "output": (_WIDTH, _SIGNS),
                "output_bias": (_SIGNS,),
            }
        )
        self._started: dict[tuple[int, ...], Tensor] = {}

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return policies warm-started to a success rate of 10 %, [seeds, parameters]."""
        if seeds not in self._started:
            theta = self.shapes.initial(seeds)
            warm_start(
                theta,
                self._log_success,
                seeds=seeds,
                prompts=self.prompts,
                batch=self.prompts,
                until_score=_WARM_SCORE,
            )
            self._started[seeds] = theta
        return self._started[seeds].clone()

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Draw every place at once; ``uniform`` is [rows, n, G, T]."""
        policy = self._policy(theta, prompt)
        cumulative = policy.exp().cumsum(-1)[:, :, None]  # [rows, n, 1, T, signs]
        token = (uniform.unsqueeze(-1) >= cumulative[..., :-1]).sum(-1)
        reward = (token[..., self._place] == self._right[prompt].unsqueeze(2)).all(-1).float()
        return Completions(
            token=token,
            mask=torch.ones_like(token, dtype=torch.bool),
            reward=reward,
            log_probability=policy.unsqueeze(2).expand(*token.shape, -1),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, T, signs]; the completions of a prompt share their distributions."""
        return self._policy(theta, prompt).unsqueeze(2).expand(*token.shape, -1)

    def score(self, theta: Tensor) -> Tensor:
        """Return the probability of success, mean over all prompts, [rows]."""
        with torch.no_grad():
            everything = torch.arange(self.prompts).expand(len(theta), -1)
            return self._log_success(theta, everything).exp().mean(1)

    def _log_success(self, theta: Tensor, prompt: Tensor) -> Tensor:
        """Return [rows, n], nats: of all four decisive places being right."""
        policy = self._policy(theta, prompt)[:, :, self._place]
        return policy.gather(-1, self._right[prompt].unsqueeze(-1)).squeeze(-1).sum(-1)

    def _policy(self, theta: Tensor, prompt: Tensor) -> Tensor:
        """Return [rows, n, T, signs], nats."""
        p = self.shapes.views(theta)
        rows = torch.arange(len(theta)).unsqueeze(1)
        mixed = p["prompt_embedding"][rows, prompt].unsqueeze(2) * p["place_embedding"].unsqueeze(1)
        hidden = (4 * mixed).tanh().flatten(1, 2)
        logits = torch.baddbmm(p["output_bias"].unsqueeze(1), hidden, p["output"])
        return logits.view(len(theta), -1, self.tokens, _SIGNS).log_softmax(-1)
