"""No admitted token holds more than a twentieth of the squared gradient of a learner with its defaults."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.config import LearnerConfig
from learner.intake.group_verdict import LEAST_LOGPROB
from learner.objective.batch import ObjectiveBatch
from learner.objective.formulas.advantage import standardised_advantage
from learner.objective.registry import load_objective
from learner.step.step_loss import StepLoss

COMPLETIONS = 64
GROUP_SIZE = 8
TOKENS = 1000
LARGEST_SHARE = 0.05
NAMED = ((-15.0, -1.0), (-1.0, -15.0), (-8.0, -1.0), (-1.0, -8.0), (-1e4, -1.0), (0.0, LEAST_LOGPROB))
"""Learner and behaviour logprobs of outliers that were met, or are the farthest there can be."""

GROUPS = COMPLETIONS // GROUP_SIZE
PLACEMENTS = 1_000
PLACED_AT_ONCE = 100


def shipped_loss() -> StepLoss:
    """Return the loss of a learner whose configuration changes nothing."""
    fields = LearnerConfig.model_fields
    return StepLoss(
        load_objective(fields["objective"].default),
        kl_coefficient=fields["kl_coefficient"].default,
        reference_kl_coefficient=fields["reference_kl_coefficient"].default,
        discounts_by_sample_size=fields["staleness_discount"].default == "sample_size",
    )


def made_up_step(generator: torch.Generator) -> ObjectiveBatch:
    """64 completions of 1000 tokens, somewhat or not at all apart, young or old."""
    shape = (COMPLETIONS, TOKENS)
    spread = 0.5 * float(torch.rand((), generator=generator))
    q = -torch.empty(shape).exponential_(1.5, generator=generator)
    p = (q + spread * torch.randn(shape, generator=generator)).clamp(max=0.0)
    reward = torch.randint(0, 2, (GROUPS, GROUP_SIZE), generator=generator).double()
    reward[:, 0], reward[:, 1] = 0.0, 1.0
    return ObjectiveBatch(
        learner_logprob=p,
        behaviour_logprob=q,
        mask=torch.ones(shape, dtype=torch.bool),
        group_index=torch.arange(COMPLETIONS) // GROUP_SIZE,
        reward=reward.flatten(),
        staleness_versions=torch.randint(0, 300, (COMPLETIONS,), generator=generator),
        max_tokens=TOKENS,
    )


def squares(loss: StepLoss, batch: ObjectiveBatch) -> Tensor:
    """Return the squared gradient of each token, [n, t], of a loss that is the sum over completions."""
    leaf = batch.learner_logprob.detach().requires_grad_()
    measured = loss(replace(batch, learner_logprob=leaf)).loss * len(leaf)
    (gradient,) = torch.autograd.grad(measured, leaf)
    return gradient**2


def placed(
    batch: ObjectiveBatch, generator: torch.Generator, *, named: bool
) -> tuple[Tensor, ObjectiveBatch]:
    """Return groups of the batch, each with an outlier of its own somewhere, and which groups they are."""
    group = torch.randint(GROUPS, (PLACED_AT_ONCE,), generator=generator)
    rows = (group[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE)).flatten()
    p, q = batch.learner_logprob[rows].clone(), batch.behaviour_logprob[rows].clone()
    row = torch.arange(PLACED_AT_ONCE) * GROUP_SIZE
    row = row + torch.randint(GROUP_SIZE, (PLACED_AT_ONCE,), generator=generator)
    column = torch.randint(TOKENS, (PLACED_AT_ONCE,), generator=generator)
    learner = -(10 ** (7 * torch.rand(PLACED_AT_ONCE, generator=generator) - 3))
    behaviour = LEAST_LOGPROB * torch.rand(PLACED_AT_ONCE, generator=generator)
    if named:
        learner[: len(NAMED)], behaviour[: len(NAMED)] = torch.tensor(NAMED).unbind(dim=1)
    p[row, column], q[row, column] = learner, behaviour
    return group, ObjectiveBatch(
        learner_logprob=p,
        behaviour_logprob=q,
        mask=batch.mask[rows],
        group_index=torch.arange(len(rows)) // GROUP_SIZE,
        reward=batch.reward[rows],
        staleness_versions=batch.staleness_versions[rows],
        max_tokens=batch.max_tokens,
    )


def test_no_outlier_holds_a_twentieth_of_the_squared_gradient() -> None:
    """Only the outlier's own group is evaluated again: the other completions do not know of it."""
    loss, generator = shipped_loss(), torch.Generator().manual_seed(11)
    for number in range(PLACEMENTS // PLACED_AT_ONCE):
        if number % 2 == 0:
            batch = made_up_step(generator)
            whole = squares(loss, batch)
            of_groups = whole.view(GROUPS, -1).sum(dim=1)
            largest = whole.max()
        group, outliers = placed(batch, generator, named=number % 2 == 0)
        each = squares(loss, outliers).view(PLACED_AT_ONCE, -1)
        total = of_groups.sum() - of_groups[group] + each.sum(dim=1)
        share = torch.maximum(each.max(dim=1).values, largest) / total
        assert float(share.max()) <= LARGEST_SHARE


@settings(max_examples=200)
@given(
    rows=st.integers(1, 12),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 0.3, 3.0, 30.0, 1e4]),
)
def test_no_token_of_any_batch_pulls_harder_than_on_policy(
    rows: int, tokens: int, seed: int, scale: float
) -> None:
    """However short the batch: |A| / tokens of GRPO, and the penalty's coefficient."""
    generator = torch.Generator().manual_seed(seed)
    q = LEAST_LOGPROB * torch.rand(rows, tokens, generator=generator) ** 3
    p = (q + scale * torch.randn(rows, tokens, generator=generator)).clamp(-1e4, 0.0).requires_grad_()
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    batch = ObjectiveBatch(
        learner_logprob=p,
        behaviour_logprob=q,
        mask=mask,
        group_index=torch.randint(0, 3, (rows,), generator=generator),
        reward=torch.randn(rows, generator=generator, dtype=torch.float64),
        staleness_versions=torch.randint(0, 300, (rows,), generator=generator),
        max_tokens=tokens,
    )
    loss = shipped_loss()
    (gradient,) = torch.autograd.grad(loss(batch).loss, p)
    of_reward = standardised_advantage(batch.reward, batch.groups).abs() / rows
    # The penalty is a mean over groups, and a group may be of one completion.
    of_penalty = loss.kl_coefficient / (batch.groups.count * batch.groups.spread(batch.groups.size(q[:, 0])))
    bound = ((of_reward + of_penalty) / batch.lengths)[:, None]
    assert bool((gradient.abs() <= 1.001 * bound + 1e-12).all())
