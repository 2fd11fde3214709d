"""Many small models as one: every seed is a row of one parameter matrix.

Nothing here mixes rows, so a seed's run is the same whichever seeds run beside it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MOST_WARM_STEPS: Final = 1500
_WARM_LEARNING_RATE: Final = 3e-3


@dataclass(frozen=True, slots=True)
class Shapes:
    """Names of the columns of a parameter matrix [rows, size], in order."""

    named: Mapping[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        """Parameters of one model."""
        return sum(math.prod(shape) for shape in self.named.values())

    def columns(self, first: str) -> Tensor:
        """Return which columns belong to parameters whose name begins with ``first``: [size], bool."""
        return torch.cat(
            [torch.full((math.prod(shape),), name.startswith(first)) for name, shape in self.named.items()]
        )

    def views(self, theta: Tensor) -> dict[str, Tensor]:
        """Return each parameter as [rows, *shape], sharing memory and gradient with ``theta``."""
        columns = torch.split(theta, [math.prod(shape) for shape in self.named.values()], dim=1)
        return {
            name: column.reshape(theta.shape[0], *shape)
            for (name, shape), column in zip(self.named.items(), columns, strict=True)
        }

    def untrained(self, seeds: tuple[int, ...]) -> Tensor:
        """Return ``initial`` parameters whose ``output`` matrices are a tenth: policies close to uniform."""
        theta = self.initial(seeds)
        for name, column in self.views(theta).items():
            if name.startswith("output"):
                column.mul_(0.1)
        return theta

    def initial(self, seeds: tuple[int, ...]) -> Tensor:
        """Return [seeds, size]: matrices normal with standard deviation 1/sqrt(fan in), vectors 0.

        A name that ends in ``gain`` starts at 1; one that ends in ``embedding`` is N(0, 1/2).
        """
        rows = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            columns = []
            for name, shape in self.named.items():
                values = torch.randn(shape, generator=generator)
                if name.endswith("gain"):
                    values = torch.ones(shape)
                elif name.endswith("embedding"):
                    values = values / 2
                elif len(shape) == 1:
                    values = torch.zeros(shape)
                else:
                    values = values / math.sqrt(shape[0])
                columns.append(values.flatten())
            rows.append(torch.cat(columns))
        return torch.stack(rows)


def crooked_features(seed: int, *, count: int, features: int) -> tuple[Tensor, NDArray[np.int64]]:
    """Draw what a perceptron sees, [count, features], and a rank that follows from it in a crooked way."""
    rng = np.random.default_rng(seed)
    feature = rng.standard_normal((count, features))
    crooked = np.tanh(feature @ rng.standard_normal((features, 6)) / 2) @ rng.standard_normal(6)
    return torch.from_numpy(feature).float(), crooked.argsort().argsort()


def choice(probability: Tensor, uniform: Tensor) -> Tensor:
    """Draw from [..., n, choices] by inverting the distribution at ``uniform`` [..., n] in [0, 1).

    A rounding error at the top end falls to the last choice that has any probability.
    """
    cumulative = probability.cumsum(dim=-1)
    index = (cumulative <= (uniform * cumulative[..., -1:].squeeze(-1)).unsqueeze(-1)).sum(dim=-1)
    return index.clamp(max=probability.shape[-1] - 1)


class Adam:
    """Adam with one gradient-norm bound a row; rows never meet.

    Source: arXiv:1412.6980, algorithm 1.
    """

    def __init__(self, theta: Tensor, learning_rate: float, *, gradient_clip_norm: float) -> None:
        self._theta = theta
        self._learning_rate = learning_rate
        self._clip_norm = gradient_clip_norm
        self._first = torch.zeros_like(theta)
        self._second = torch.zeros_like(theta)
        self._steps = 0

    def step(self, gradient: Tensor, rate_factor: Tensor | None = None) -> None:
        """Move every row in place; ``rate_factor`` [rows] scales the learning rate of each."""
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient = gradient * (self._clip_norm / norm.clamp(min=self._clip_norm))
        self._steps += 1
        self._first.lerp_(gradient, 1 - 0.9)
        self._second.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
        denominator = (self._second / (1 - 0.999**self._steps)).sqrt_().add_(1e-8)
        move = self._first / denominator
        if rate_factor is not None:
            move *= rate_factor.unsqueeze(1)
        self._theta.sub_(move, alpha=self._learning_rate / (1 - 0.9**self._steps))


def warm_start(
    theta: Tensor,
    log_likelihood: Callable[[Tensor, Tensor], Tensor],
    *,
    prompts: int,
    batch: int,
    until_score: float,
) -> None:
    """Train one model on right answers until it gives them with probability ``until_score``, in place.

    Args:
        theta: [1, parameters]
        log_likelihood: from theta and prompts [1, batch] to the right answers' logprobs, [1, batch].
        prompts: how many there are to draw from.
        batch: prompts a step.
        until_score: in (0, 1), mean of a batch.
    """
    leaf = theta.detach().requires_grad_()
    adam = Adam(theta, _WARM_LEARNING_RATE, gradient_clip_norm=1.0)
    order = np.random.default_rng([0, 0])
    for _ in range(_MOST_WARM_STEPS):
        right = log_likelihood(leaf, torch.from_numpy(order.integers(prompts, size=(1, batch))))
        if float(right.detach().exp().mean()) >= until_score:
            return
        (gradient,) = torch.autograd.grad(-right.mean(1).sum(), leaf)
        adam.step(gradient)
