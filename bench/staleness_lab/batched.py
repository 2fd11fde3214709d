"""Many small models as one: every seed is a row of one parameter matrix.

Nothing here mixes rows, so a seed's run is the same whichever seeds run beside it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the columns of a parameter matrix [rows, size] are, in order."""

    named: Mapping[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        """Parameters of one model."""
        return sum(math.prod(shape) for shape in self.named.values())

    def views(self, theta: Tensor) -> dict[str, Tensor]:
        """Give each parameter as [rows, *shape], sharing memory and gradient with ``theta``."""
        columns = torch.split(theta, [math.prod(shape) for shape in self.named.values()], dim=1)
        return {
            name: column.reshape(theta.shape[0], *shape)
            for (name, shape), column in zip(self.named.items(), columns, strict=True)
        }

    def initial(self, seeds: tuple[int, ...]) -> Tensor:
        """Give [seeds, size]: matrices normal with standard deviation 1/sqrt(fan in), vectors 0.

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
