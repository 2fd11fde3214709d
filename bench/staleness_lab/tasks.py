"""What a task is: a policy family, prompts, sampling, scores. No objective and no delay in here."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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


class Task(Protocol):
    """A family of small policies and the problem they are trained on."""

    groups: int
    """Prompts a step."""
    group_size: int
    """Completions a prompt."""
    tokens: int
    """Longest completion."""
    prompts: int
    """Training prompts to choose from."""
    parameters: int

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Give the policies before reinforcement learning, [seeds, parameters]."""
        ...

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Write completions for ``prompt`` [rows, n] with the randomness ``uniform`` [rows, n, G, T]."""
        ...

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Score completions [rows, n, G, T]: nats over the vocabulary at every position."""
        ...

    def score(self, theta: Tensor) -> Tensor:
        """Give the share of held-out prompts answered correctly by the most probable answer, [rows]."""
        ...
