"""The step against the textbook formula on a float64 model, and against every way of cutting it up."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.model import Policy
from learner.objective.advantage import centred_advantage
from learner.objective.divergence import kl_behaviour_learner
from learner.objective.importance import group_expectation_weight
from learner.objective.surrogate import clipped_surrogate
from learner.packing import micro_batches, rows_of
from learner.train_step import StepOutcome, StepSettings, train_step
from node.rollout import RolloutGroup
from support.groups import SAMPLING, make_completion, make_group
from support.tiny_model import make_tiny_model

SETTINGS = StepSettings(
    clip_epsilon=0.2,
    kl_coefficient=0.1,
    gradient_clip_norm=1e9,
    staleness_half_life_versions=2.0,
    micro_batch_tokens=1 << 20,
)
VERSION = 3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1)


def float64_policy(model_dir: Path) -> Policy:
    return Policy(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64))


def made_up_groups(seed: int, *, reward: float | None = None) -> list[RolloutGroup]:
    """Three groups of unequal sizes, lengths, ages and temperatures."""
    random = np.random.default_rng(seed)
    groups = []
    for number, (size, version) in enumerate([(4, 3), (2, 1), (5, 2)]):
        completions = tuple(
            make_completion(
                n,
                version=version,
                reward=float(random.normal()) if reward is None else reward,
                token_ids=random.integers(0, 42, n).astype(np.int32),
                behaviour_logprob=-random.exponential(3.0, n).astype(np.float32),
            )
            for n in random.integers(1, 9, size)
        )
        prompt = random.integers(0, 42, random.integers(1, 6)).astype(np.int32)
        sampling = replace(SAMPLING, temperature=1.0 + 0.5 * number)
        groups.append(
            make_group(str(number), completions=completions, prompt_token_ids=prompt, sampling=sampling)
        )
    return groups


def gradient_of(
    policy: Policy, groups: Sequence[RolloutGroup], settings: StepSettings = SETTINGS
) -> tuple[Tensor, StepOutcome]:
    """The gradient a step applied, read off plain gradient descent with rate 1."""
    before = torch.cat([p.detach().clone().flatten() for p in policy.parameters.values()])
    optimizer = torch.optim.SGD(policy.parameters.values(), lr=1.0)
    outcome = train_step(policy, optimizer, groups, version=VERSION, settings=settings)
    after = torch.cat([p.detach().flatten() for p in policy.parameters.values()])
    return before - after, outcome


def textbook_loss(policy: Policy, groups: Sequence[RolloutGroup]) -> Tensor:
    """One sequence at a time, whole groups, straight from the formulas."""
    losses = []
    for group in groups:
        learner, behaviour, divergence = [], [], []
        for completion in group.completions:
            tokens = torch.tensor(np.concatenate([group.prompt_token_ids, completion.token_ids]))[None].long()
            target = tokens[:, len(group.prompt_token_ids) :]
            temperature = torch.tensor([group.sampling.temperature], dtype=torch.float64)
            lp = policy.token_logprobs(tokens[:, :-1], target, temperature)[0]
            lq = torch.from_numpy(completion.behaviour_logprob).double()
            learner.append(lp.mean())
            behaviour.append(lq.mean())
            divergence.append(kl_behaviour_learner(lp, lq).mean())
        weight = group_expectation_weight(torch.stack(learner), torch.stack(behaviour))
        reward = torch.tensor([c.reward for c in group.completions], dtype=torch.float64)
        surrogate = clipped_surrogate(weight, centred_advantage(reward), clip_epsilon=0.2).loss
        discount = 0.5 ** ((VERSION - group.oldest_version) / 2.0)
        losses.append(discount * (surrogate + 0.1 * torch.stack(divergence)).mean())
    return torch.stack(losses).mean()


def test_the_step_follows_the_gradient_of_the_textbook_loss(model_dir: Path) -> None:
    groups = made_up_groups(0)
    policy = float64_policy(model_dir)
    loss = textbook_loss(policy, groups)
    gradients = torch.autograd.grad(loss, list(policy.parameters.values()))
    expected = torch.cat([g.flatten() for g in gradients])
    actual, outcome = gradient_of(policy, groups)
    assert expected.norm() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert math.isclose(outcome.loss, loss.item(), rel_tol=1e-12)
    assert math.isclose(outcome.gradient_norm, float(expected.norm()), rel_tol=1e-9)


@pytest.mark.parametrize("budget", [1, 8, 17, 40, 1 << 20])
def test_the_micro_batch_budget_changes_no_result(model_dir: Path, budget: int) -> None:
    groups = made_up_groups(1)
    expected, whole = gradient_of(float64_policy(model_dir), groups)
    actual, cut = gradient_of(float64_policy(model_dir), groups, replace(SETTINGS, micro_batch_tokens=budget))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    for field in ("loss", "kl_nats", "ess_ratio", "clip_fraction", "surprisal_nats", "tokens"):
        assert math.isclose(getattr(cut, field), getattr(whole, field), rel_tol=1e-9), field


def test_the_order_of_groups_and_completions_changes_no_result(model_dir: Path) -> None:
    groups = made_up_groups(2)
    turned = [replace(group, completions=group.completions[::-1]) for group in reversed(groups)]
    expected, _ = gradient_of(float64_policy(model_dir), groups)
    actual, _ = gradient_of(float64_policy(model_dir), turned)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_equal_rewards_move_nothing(model_dir: Path) -> None:
    settings = replace(SETTINGS, kl_coefficient=0.0)
    gradient, outcome = gradient_of(float64_policy(model_dir), made_up_groups(3, reward=0.1), settings)
    assert (gradient == 0).all()
    assert outcome.is_applied


def test_the_step_makes_the_rewarded_completion_more_likely(model_dir: Path) -> None:
    policy = float64_policy(model_dir)
    good, bad = np.array([7, 8, 1], np.int32), np.array([9, 5, 1], np.int32)
    completions = (make_completion(3, token_ids=good, reward=1.0), make_completion(3, token_ids=bad))
    group = make_group(completions=completions)

    def preference() -> float:
        with torch.no_grad():
            prompt = torch.tensor(group.prompt_token_ids).long()
            both = torch.stack([torch.cat([prompt, torch.tensor(ids).long()]) for ids in (good, bad)])
            ones = torch.ones(2, dtype=torch.float64)
            logprob = policy.token_logprobs(both[:, :-1], both[:, 3:], ones).sum(dim=1)
            return float(logprob[0] - logprob[1])

    before = preference()
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-3)
    for version in range(5):
        train_step(policy, optimizer, [group], version=version, settings=replace(SETTINGS, kl_coefficient=0))
    assert preference() > before


def test_a_gradient_that_is_not_finite_leaves_the_parameters_alone(model_dir: Path) -> None:
    policy = float64_policy(model_dir)
    huge = (make_completion(3, reward=1e300), make_completion(3, reward=-1e300))
    gradient, outcome = gradient_of(policy, [make_group(completions=huge)])
    assert not outcome.is_applied
    assert (gradient == 0).all()


def test_a_long_gradient_is_scaled_to_the_clip(model_dir: Path) -> None:
    settings = replace(SETTINGS, gradient_clip_norm=1e-3)
    gradient, outcome = gradient_of(float64_policy(model_dir), made_up_groups(0), settings)
    assert math.isclose(float(gradient.norm()), 1e-3, rel_tol=1e-2)
    assert outcome.gradient_norm > 1e-3


def test_micro_batches_keep_every_row_once_within_the_padded_budget() -> None:
    rows = rows_of(made_up_groups(4), version=VERSION, half_life_versions=math.inf)
    cut = micro_batches(rows, budget_tokens=20)
    assert sorted(id(row) for part in cut for row in part) == sorted(id(row) for row in rows)
    assert len(cut) > 1
    for part in cut:
        assert len(part) == 1 or len(part) * max(row.length for row in part) <= 20


def test_the_shares_of_a_step_sum_to_its_mean_discount() -> None:
    rows = rows_of(made_up_groups(5), version=VERSION, half_life_versions=2.0)
    assert math.isclose(sum(row.share for row in rows), (1 + 0.5 + 0.5**0.5) / 3, rel_tol=1e-12)
