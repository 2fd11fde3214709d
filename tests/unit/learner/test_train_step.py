"""The step against the textbook formula on a float64 model, and against every way of cutting it up."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.model.micro_batches import objective_batch
from learner.model.model import Policy
from learner.objective.formulas.advantage import centred_advantage
from learner.objective.formulas.divergence import kl_penalty
from learner.objective.formulas.surrogate import clipped_surrogate
from learner.step.step_loss import group_discount
from learner.step.train_step import train_step
from node.values.groups.rollout import RolloutGroup
from support.groups import make_completion, make_group
from support.made_up_groups import (
    VERSION,
    completion_logprob,
    float64_policy,
    gradient_of,
    groups_with_replies,
    made_up_groups,
    shared_policy,
)
from support.objective_batches import group_expectation_weight
from support.step_settings import changed, make_step_settings

SETTINGS = make_step_settings(kl_coefficient=0.1, gradient_clip_norm=1e9, staleness_half_life_versions=2.0)


def textbook_loss(policy: Policy, groups: Sequence[RolloutGroup]) -> Tensor:
    """One sequence at a time, whole groups, straight from the formulas."""
    losses = []
    for group in groups:
        learner, behaviour, divergence = [], [], []
        for completion in group.completions:
            lp = completion_logprob(
                policy, group.prompt_token_ids, completion.token_ids, temperature=group.sampling.temperature
            )
            drawn = torch.from_numpy(completion.drawn)
            lp, lq = lp[drawn], torch.from_numpy(completion.behaviour_logprob).double()[drawn]
            learner.append(lp.mean())
            behaviour.append(lq.mean())
            divergence.append(kl_penalty(lp, lq).mean())
        weight = group_expectation_weight(torch.stack(learner), torch.stack(behaviour))
        reward = torch.tensor([c.reward for c in group.completions], dtype=torch.float64)
        surrogate = clipped_surrogate(weight, centred_advantage(reward), clip_low=0.2, clip_high=0.2).loss
        discount = 0.5 ** ((VERSION - group.oldest_version) / 2.0)
        losses.append(discount * (surrogate + 0.1 * torch.stack(divergence)).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("groups", [made_up_groups(0), groups_with_replies(0)], ids=["drawn", "replies"])
def test_the_step_follows_the_gradient_of_the_textbook_loss(
    model_dir: Path, groups: list[RolloutGroup]
) -> None:
    policy = float64_policy(model_dir)
    loss = textbook_loss(policy, groups)
    gradients = torch.autograd.grad(loss, list(policy.parameters.values()))
    expected = torch.cat([g.flatten() for g in gradients])
    actual, outcome = gradient_of(policy, groups, SETTINGS)
    assert expected.norm() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert math.isclose(outcome.loss, loss.item(), rel_tol=1e-12)
    assert math.isclose(outcome.numbers.gradient_norm, float(expected.norm()), rel_tol=1e-9)
    assert outcome.numbers.tokens == sum(group.drawn_tokens for group in groups)


def test_the_moments_of_adamw_do_not_advance_on_a_batch_that_teaches_nothing(model_dir: Path) -> None:
    policy = float64_policy(model_dir)
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-3)
    train_step(policy, optimizer, made_up_groups(1), version=VERSION, settings=SETTINGS)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    train_step(policy, optimizer, made_up_groups(2, reward=0.0), version=VERSION, settings=SETTINGS)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[n][key], before[n][key]) for n in before for key in before[n])


def test_the_penalty_towards_the_base_model_teaches_without_an_advantage(model_dir: Path) -> None:
    policy, base = float64_policy(model_dir), float64_policy(model_dir)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.01 * torch.randn_like(parameter))
    settings = changed(SETTINGS, reference_kl_coefficient=0.1)
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-3)
    outcome = train_step(
        policy, optimizer, made_up_groups(3, reward=0.1), version=VERSION, settings=settings, reference=base
    )
    assert outcome.is_applied


def test_a_gradient_that_is_not_finite_leaves_the_parameters_alone(model_dir: Path) -> None:
    policy = float64_policy(model_dir)
    huge = (make_completion(3, reward=1e300), make_completion(3, reward=-1e300))
    gradient, outcome = gradient_of(policy, [make_group(completions=huge)], SETTINGS)
    assert not outcome.is_applied
    assert (gradient == 0).all()


def test_a_long_gradient_is_scaled_to_the_clip(model_dir: Path) -> None:
    settings = changed(SETTINGS, gradient_clip_norm=1e-3)
    gradient, outcome = gradient_of(shared_policy(model_dir), made_up_groups(0), settings)
    assert math.isclose(float(gradient.norm()), 1e-3, rel_tol=1e-2)
    assert outcome.numbers.gradient_norm > 1e-3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"staleness_discount": "exponential", "staleness_half_life_versions": 2.0}, (1, 0.5, 0.5**0.5)),
        ({"staleness_discount": "polynomial", "staleness_power": 1.0}, (1, 1 / 3, 1 / 2)),
        ({"staleness_discount": "none"}, (1, 1, 1)),
        ({"staleness_discount": "sample_size"}, (1, 1, 1)),
    ],
)
def test_each_group_counts_as_much_as_its_age_leaves(
    changes: dict[str, Any], expected: tuple[float, ...]
) -> None:
    """The made-up groups are 0, 2 and 1 versions old."""
    batch = objective_batch(
        made_up_groups(5),
        version=VERSION,
        discount=group_discount(make_step_settings(**changes)),
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    discount = dict(zip(batch.group_index.tolist(), batch.discount.tolist(), strict=True))  # type: ignore[union-attr]
    assert discount == pytest.approx(dict(enumerate(expected)))
    assert sorted(set(batch.staleness_versions.tolist())) == [0, 1, 2]


@pytest.mark.parametrize("packing", ["none", "prefixes"])
def test_a_step_says_how_many_positions_the_model_read_and_how_many_tokens_differ(
    model_dir: Path, packing: str
) -> None:
    completions = tuple(
        make_completion(length, token_ids=np.arange(9, 9 + length, dtype=np.int32), reward=length)
        for length in (2, 4)
    )
    group = make_group(prompt_token_ids=np.array([1, 2, 3], np.int32), completions=completions)
    settings = changed(SETTINGS, packing=packing)
    _, outcome = gradient_of(float64_policy(model_dir), [group], settings)
    numbers = outcome.numbers
    assert (numbers.read_tokens, numbers.distinct_tokens) == ((12, 10) if packing == "none" else (6, 6))
