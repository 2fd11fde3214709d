"""The objective of many seeds: each run's batch is its own, and still most are evaluated together.

What an objective divides by, whitens over or drops from is the batch of one run. Where rows of
different runs cannot meet in it, which is tried on made-up rows, all runs go through it at once.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.forms import RecordedBatch
from bench.staleness_lab.methods import Method
from learner.objective.batch import ObjectiveBatch
from learner.objective.formulas.age_discounts import sequence_learning_rate_factor

_TOLERANCE: Final = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The completions of one step of every seed, n a seed in groups of ``group_size``."""

    learner: Tensor
    """[seeds, n, t], nats, without gradient."""
    behaviour: Tensor
    """[seeds, n, t], nats."""
    mask: Tensor
    """[seeds, n, t]"""
    reward: Tensor
    """[seeds, n]"""
    staleness: Tensor
    """[seeds, n], versions."""
    group_size: int
    expected_kl: Tensor | None = None
    """[seeds, n, t], nats: what the ages of the tokens make a learner expect, if it has measured any."""

    def of(self, seed: int) -> "Rows":
        """Return those of one seed, in the same shape."""
        part = slice(seed, seed + 1)
        return replace(
            self,
            learner=self.learner[part],
            behaviour=self.behaviour[part],
            mask=self.mask[part],
            reward=self.reward[part],
            staleness=self.staleness[part],
            expected_kl=None if self.expected_kl is None else self.expected_kl[part],
        )

    def batch(self) -> ObjectiveBatch:
        """Return the rows of all seeds as one batch whose learner logprobs are a leaf."""
        learner = self.learner.flatten(0, 1).requires_grad_()
        return RecordedBatch(
            learner_logprob=learner,
            behaviour_logprob=self.behaviour.flatten(0, 1),
            mask=self.mask.flatten(0, 1),
            group_index=torch.arange(len(learner)) // self.group_size,
            reward=self.reward.flatten(),
            staleness_versions=self.staleness.flatten(),
            max_tokens=self.learner.shape[2],
            recorded_nats=None if self.expected_kl is None else self.expected_kl.flatten(0, 1),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """Where the objective pulls the logprobs of every seed."""

    gradient: Tensor
    """[seeds, n, t]: of each seed's own loss."""
    log_ratio: Tensor
    """[seeds, n], nats: of each completion's whole p/q."""

    def rate_factors(self) -> Tensor:
        """Return VCPO's learning-rate factor of each seed, from whole weights, not the objective's."""
        return torch.tensor([sequence_learning_rate_factor(log_ratio) for log_ratio in self.log_ratio])


def pull(method: Method, rows: Rows, *, at_once: bool) -> Pull:
    """Evaluate a method's objective for every seed; ``at_once`` as ``runs_at_once`` says."""
    if at_once:
        return _pull_together(method, rows)
    each = [_pull_together(method, rows.of(seed)) for seed in range(len(rows.reward))]
    return Pull(
        gradient=torch.cat([one.gradient for one in each]),
        log_ratio=torch.cat([one.log_ratio for one in each]),
    )


def runs_at_once(method: Method, *, groups: int, group_size: int, tokens: int) -> bool:
    """Return whether the objective gives each of several runs what it gives it alone.

    Tried on rows whose ratios, lengths and rewards are far apart, with groups that teach nothing in
    one run and not in another: what is common to a batch differs between the runs.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (3, groups * group_size, tokens)
    reward = (torch.rand(shape[:2], generator=generator) < 0.4).float()
    reward[0, :group_size] = 0.0
    length = torch.randint(1, tokens + 1, shape[:2], generator=generator)
    rows = Rows(
        learner=-3 * torch.rand(shape, generator=generator),
        behaviour=-3 * torch.rand(shape, generator=generator),
        mask=torch.arange(tokens) < length.unsqueeze(-1),
        reward=reward,
        staleness=torch.randint(0, 100, shape[:2], generator=generator),
        group_size=group_size,
    )
    together, alone = (pull(method, rows, at_once=at_once) for at_once in (True, False))
    return bool(
        torch.allclose(together.gradient, alone.gradient, rtol=_TOLERANCE, atol=_TOLERANCE / shape[1])
    )


def _pull_together(method: Method, rows: Rows) -> Pull:
    batch = rows.batch()
    outcome = method.outcome(batch)
    (gradient,) = torch.autograd.grad(outcome.loss, batch.learner_logprob)
    seeds = (len(rows.reward), -1)
    return Pull(
        gradient=gradient.view_as(rows.learner) * seeds[0],  # the loss is a mean over all runs
        log_ratio=batch.log_ratio.detach().sum(dim=1).view(seeds),
    )
