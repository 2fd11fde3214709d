"""Sums and logsumexps over the completions of each prompt, where a batch holds several prompts."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Groups:
    """Which of ``count`` groups each completion belongs to."""

    index: Tensor
    """[n], int64, in 0..count-1; every group has a completion."""
    count: int

    @classmethod
    def of(cls, group_index: Tensor) -> "Groups":
        """Number the groups of a batch, given integers, [n], that are equal within a group and nowhere else.

        Raises:
            ValueError: there is no completion, or more than one axis.
        """
        if group_index.ndim != 1 or len(group_index) == 0:
            raise ValueError(f"group_index has shape {tuple(group_index.shape)}, not [n] with n >= 1")
        distinct, index = torch.unique(group_index, return_inverse=True)
        return cls(index, len(distinct))

    @classmethod
    def single(cls, values: Tensor) -> "Groups":
        """Return one group of n completions, given anything of the shape [n]."""
        if values.ndim != 1 or len(values) == 0:
            raise ValueError(f"a group has one axis and a completion, not the shape {tuple(values.shape)}")
        return cls(torch.zeros(len(values), dtype=torch.int64, device=values.device), 1)

    def sum(self, values: Tensor) -> Tensor:
        """Return [count] from [n]."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def size(self, values: Tensor) -> Tensor:
        """Return the completions of each group, [count], in the type of ``values``."""
        return self._completions.to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Return [count] from [n]."""
        return self.sum(values) / self.size(values)

    def minimum(self, values: Tensor) -> Tensor:
        """Return [count] from [n]."""
        return self._extreme(values, "amin")

    def logsumexp(self, values: Tensor) -> Tensor:
        """Return log sum exp of each group, [count] from [n]; differentiable, finite where the values are."""
        largest = self._extreme(values.detach(), "amax")
        return largest + self.sum(torch.exp(values - self.spread(largest))).log()

    def spread(self, per_group: Tensor) -> Tensor:
        """Return each completion its group's number: [n] from [count]."""
        return per_group[self.index]

    @cached_property
    def _completions(self) -> Tensor:
        return self.sum(torch.ones_like(self.index))

    def _extreme(self, values: Tensor, reduce: str) -> Tensor:
        start = values.new_zeros(self.count)
        return start.scatter_reduce(0, self.index, values, reduce, include_self=False)
