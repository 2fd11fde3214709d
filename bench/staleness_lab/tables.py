"""Policies that are a table of logits, by prompt and place: what one prompt teaches helps with no other."""

import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes
from bench.staleness_lab.tasks import Completions


class TableTask:
    """Draws every place at once; all but uniform at the start."""

    groups, group_size = 4, 8

    def __init__(self, *, prompts: int, tokens: int, choices: int) -> None:
        self.prompts, self.tokens, self._choices = prompts, tokens, choices
        self.shapes = Shapes({"output": (prompts, tokens * choices)})

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return untrained policies, close to uniform, [seeds, parameters]."""
        return 0.3 * self.shapes.initial(seeds)

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Draw every place at once; ``uniform`` is [rows, n, G, T]."""
        policy = self.policy(theta, prompt)
        cumulative = policy.exp().cumsum(-1)[:, :, None]  # [rows, n, 1, T, choices]
        token = (uniform.unsqueeze(-1) >= cumulative[..., :-1]).sum(-1)
        return Completions(
            token=token,
            mask=torch.ones_like(token, dtype=torch.bool),
            reward=self.reward(token, prompt),
            log_probability=policy.unsqueeze(2).expand(*token.shape, -1),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, T, choices]; the completions of a prompt share their distributions."""
        return self.policy(theta, prompt).unsqueeze(2).expand(*token.shape, -1)

    def policy(self, theta: Tensor, prompt: Tensor) -> Tensor:
        """Return [rows, n, T, choices], nats."""
        table = self.shapes.views(theta)["output"]
        logits = table[torch.arange(len(theta)).unsqueeze(1), prompt]
        return logits.view(*prompt.shape, self.tokens, self._choices).log_softmax(-1)

    def reward(self, token: Tensor, prompt: Tensor) -> Tensor:
        """Return what completions [rows, n, G, T] of ``prompt`` [rows, n] earn, [rows, n, G]."""
        raise NotImplementedError
