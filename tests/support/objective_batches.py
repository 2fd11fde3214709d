"""Batches for objectives: made up from a seed, padded and ordered any way."""

import math
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from learner.objective.batch import ObjectiveBatch
from learner.objective.formulas.importance import expectation_weight, log_group_expectation
from support.objective_twins import Rows, Sample


def made_up(seed: int, *, spread: float = 0.5) -> tuple[Rows, Sample]:
    """Three groups of unequal sizes, one of equal rewards; learner and behaviour ``spread`` nats apart."""
    random = Random(seed)
    group = [0] * 4 + [5] * 3 + [2] * 2
    lengths = [random.randint(1, 5) for _ in group]
    q = [[-random.expovariate(0.7) - 0.05 for _ in range(n)] for n in lengths]
    p = [[min(-0.01, x + random.gauss(0, spread)) for x in row] for row in q]
    reward = [1.0, 0.0, 0.25, 1.0, 0.5, 0.0, 0.75, 0.5, 0.5]
    return p, Sample(q, group, reward, [random.randint(0, 5) for _ in group], max_tokens=6)


def batch_of(
    p: Rows, sample: Sample, *, pad_left: int = 0, pad_right: int = 0, filling: float = math.nan
) -> ObjectiveBatch:
    """Pad with ``filling``; every logprob is float64."""
    longest = max(map(len, p))

    def rows(values: Rows) -> Tensor:
        return torch.tensor(
            [[filling] * pad_left + row + [filling] * (longest - len(row) + pad_right) for row in values],
            dtype=torch.float64,
        )

    mask = torch.tensor(
        [[False] * pad_left + [True] * len(row) + [False] * (longest - len(row) + pad_right) for row in p]
    )
    return ObjectiveBatch(
        learner_logprob=rows(p).requires_grad_(),
        behaviour_logprob=rows(sample.q),
        mask=mask,
        group_index=torch.tensor(sample.group),
        reward=torch.tensor(sample.reward, dtype=torch.float64),
        staleness_versions=torch.tensor(sample.staleness),
        max_tokens=sample.max_tokens,
        proximal_logprob=None if sample.proximal is None else rows(sample.proximal),
    )


def whole_rows(
    learner: Tensor,
    behaviour: Tensor,
    reward: Tensor,
    *,
    group: Tensor | None = None,
    staleness: int = 0,
    proximal: Tensor | None = None,
) -> ObjectiveBatch:
    """Return rows of as many tokens each, [n, t], nats, of one staleness; of one group if none is given."""
    rows, tokens = learner.shape
    return ObjectiveBatch(
        learner_logprob=learner.detach().clone().requires_grad_(),
        behaviour_logprob=behaviour,
        mask=torch.ones(rows, tokens, dtype=torch.bool),
        group_index=torch.zeros(rows, dtype=torch.int64) if group is None else group,
        reward=reward,
        staleness_versions=torch.full((rows,), staleness),
        max_tokens=tokens,
        proximal_logprob=proximal,
    )


def in_order(batch: ObjectiveBatch, order: list[int]) -> ObjectiveBatch:
    """Return the same rows in another order."""
    return replace(
        batch,
        learner_logprob=batch.learner_logprob.detach()[order].requires_grad_(),
        behaviour_logprob=batch.behaviour_logprob[order],
        mask=batch.mask[order],
        group_index=batch.group_index[order],
        reward=batch.reward[order],
        staleness_versions=batch.staleness_versions[order],
        discount=None if batch.discount is None else batch.discount[order],
        proximal_logprob=None if batch.proximal_logprob is None else batch.proximal_logprob[order],
    )


def group_expectation_weight(learner_logprob: Tensor, behaviour_logprob: Tensor) -> Tensor:
    """Return GEPO's weight of each completion of one group: p / E."""
    return expectation_weight(learner_logprob, log_group_expectation(behaviour_logprob))


def gradient_of(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return d loss / d learner logprob, [n, t]."""
    (gradient,) = torch.autograd.grad(loss, batch.learner_logprob)
    return gradient
