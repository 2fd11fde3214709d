"""Interface of a task: a policy family, prompts, sampling, scores. It knows neither objectives nor delays."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes


@dataclass(frozen=True, slots=True)
class Completions:
    """G completions for each of n prompts, for each of some rows of models."""

    token: Tensor
    """[rows, n, G, T], int64."""
    mask: Tensor
    """[rows, n, G, T], bool: True where a token was written."""
    reward: Tensor
    """[rows, n, G], in [0, 1]."""
    log_probability: Tensor
    """[rows, n, G, T, vocabulary], nats: the whole behaviour distribution, so that KL needs no estimate."""

    def unflatten(self, rows: int) -> "Completions":
        """Return [rows, n, ...] from completions of one prompt for each of rows * n models."""
        return Completions(
            *(
                torch.unflatten(each.squeeze(1), 0, (rows, -1))
                for each in (self.token, self.mask, self.reward, self.log_probability)
            )
        )


class Task(Protocol):
    """A family of small policies and the problem they are trained on."""

    shapes: Shapes
    """Parameters of one policy; logits are linear in those that begin with ``output``."""
    groups: int
    """Prompts a version."""
    group_size: int
    """Completions a prompt."""
    tokens: int
    """Longest completion."""
    prompts: int
    """Training prompts to choose from."""

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return the policies before reinforcement learning, [seeds, parameters]."""
        ...

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Write completions for ``prompt`` [rows, n] with the randomness ``uniform`` [rows, n, G, T]."""
        ...

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Score completions [rows, n, G, T]: nats over the vocabulary at every position."""
        ...

    def score(self, theta: Tensor) -> Tensor:
        """Return the score on held-out prompts, in [0, 1], [rows]."""
        ...
