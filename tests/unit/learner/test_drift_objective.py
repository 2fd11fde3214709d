"""The default objective sees how old its tokens are, and pushes nothing that the reward does not ask for."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.intake.divergence_panel import DivergencePanel
from learner.objective.batch import ObjectiveBatch
from learner.objective.divergence import SUPPOSED_NATS_PER_VERSION
from learner.objective.drift import (
    blended_divergence,
    has_moved,
    largest_move,
    truncated_group_weight,
)
from learner.objective.importance import log_group_expectation
from learner.objective.registry import load_objective
from learner.training.micro_batches import objective_batch
from support.fleets import one
from support.made_up_groups import VERSION, float64_policy, made_up_groups, nearby
from support.made_up_groups import gradient_of as gradient_step
from support.objective_batches import batch_of, gradient_of, made_up
from support.step_settings import make_step_settings
from support.tiny_model import make_tiny_model


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
def test_equal_logprobs_of_another_age_are_another_loss(spread: float) -> None:
    p, sample = made_up(3, spread=spread)
    objective = load_objective("drift_aware")
    losses, gradients = [], []
    for staleness in (0, 64):
        batch = batch_of(p, replace(sample, staleness=[staleness] * len(p)))
        loss = objective(batch).loss
        losses.append(float(loss.detach()))
        gradients.append(gradient_of(loss, batch)[batch.mask])
    assert abs(losses[0] - losses[1]) > 1e-5
    assert not torch.allclose(gradients[0], gradients[1], rtol=1e-3)


def test_equal_logprobs_of_another_record_are_another_loss() -> None:
    p, sample = made_up(3, spread=0.2)
    objective = load_objective("drift_aware")
    losses = [
        float(objective(batch_of(p, replace(sample, expected=[[nats] * len(x) for x in p]))).loss.detach())
        for nats in (0.0, 0.01, 0.1)
    ]
    assert len({round(loss, 6) for loss in losses}) == 3


def test_only_the_record_counts_once_there_is_one() -> None:
    p, sample = made_up(3, spread=0.2)
    measured = replace(sample, expected=[[0.05] * len(x) for x in p])
    old, young = (replace(measured, staleness=[age] * len(p)) for age in (64, 0))
    objective = load_objective("drift_aware")
    assert torch.equal(objective(batch_of(p, old)).loss, objective(batch_of(p, young)).loss)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5])
def test_the_gauge_counts_the_tokens_whose_weight_the_loss_cut_to_one(spread: float) -> None:
    """q_i/E moves the ceiling of a completion, and one that is left alone has no weight to cut."""
    p, sample = made_up(5, spread=spread)
    batch = batch_of(p, replace(sample, staleness=[64] * len(p)))
    outcome = load_objective("drift_aware")(batch)
    assert outcome.trust is not None
    assert outcome.is_truncated is not None
    mean = batch.behaviour_mean
    expectation = log_group_expectation(mean, batch.groups)
    whole = torch.exp(outcome.trust[:, None] * (batch.log_ratio.detach() + (mean - expectation)[:, None]))
    cut = (whole > outcome.weight * (1 + 1e-12)) & ~outcome.is_clipped & batch.mask
    assert torch.equal(outcome.is_truncated, cut)
    assert 0 < int(cut.sum()) < int(batch.mask.sum())


def test_two_completions_of_one_token_by_hand() -> None:
    """q = (.2, .8), E = .68; p = (.4, .4); the record says 0.125 nats: a move of sqrt(.25) = .5."""
    batch = ObjectiveBatch(
        learner_logprob=column(0.4, 0.4).log()[:, None].requires_grad_(),
        behaviour_logprob=column(0.2, 0.8).log()[:, None],
        mask=torch.ones(2, 1, dtype=torch.bool),
        group_index=torch.zeros(2, dtype=torch.int64),
        reward=column(0, 1),
        staleness_versions=torch.zeros(2),
        max_tokens=1,
        expected_kl_nats=torch.full((2, 1), 0.125, dtype=torch.float64),
    )
    outcome = load_objective("drift_aware")(batch)
    # KL: (k3 + 2 * .125) / 3 with k3 = 1 - ln 2 and ln 2 - 1/2.
    f = [1 - math.exp(-(1 - math.log(2) + 0.25) / 6), 1 - math.exp(-(math.log(2) - 0.5 + 0.25) / 6)]
    assert f == pytest.approx([0.0886323, 0.0711963], abs=1e-7)
    assert outcome.trust is not None
    assert outcome.trust.tolist() == pytest.approx(f, rel=1e-9)
    expected = [(0.4 / 0.68) ** f[0], (0.4 / 0.68) ** f[1]]
    assert outcome.weight[:, 0].tolist() == pytest.approx(expected, rel=1e-9)
    assert not outcome.is_clipped.any()
    # The other way round both have moved by ln 2 > .5 as they are pushed.
    swapped = load_objective("drift_aware")(replace(batch, reward=column(1, 0)))
    assert swapped.is_clipped.all()
    assert float(swapped.loss.detach()) == 0


def test_tokens_that_decide_nothing_cancel_over_all_orders_of_the_rewards() -> None:
    """The rewards have nothing to do with the tokens; a weight that depends on the advantage pushes still."""
    generator = torch.Generator().manual_seed(5)
    q = -torch.empty(4, 6, dtype=torch.float64).exponential_(generator=generator)
    p = (q + 0.3 * torch.randn(q.shape, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    pushes = {}
    wide = {"most_nats": 9.0, "deviations": 99.0}
    for name, options in (("drift_aware", wide), ("topr", {}), ("grpo", {}), ("version_aware_kl", {})):
        total = torch.zeros_like(q)
        for reward in itertools.permutations((0.0, 0.0, 1.0, 1.0)):
            batch = ObjectiveBatch(
                learner_logprob=p.clone().requires_grad_(),
                behaviour_logprob=q,
                mask=torch.ones(q.shape, dtype=torch.bool),
                group_index=torch.zeros(4, dtype=torch.int64),
                reward=column(*reward),
                staleness_versions=torch.full((4,), 64),
                max_tokens=6,
            )
            total += gradient_of(load_objective(name, options)(batch).loss, batch)
        pushes[name] = float(total.abs().max())
    assert pushes.pop("drift_aware") < 1e-12
    assert min(pushes.values()) > 1e-3


def test_a_token_never_counts_more_than_one_and_on_policy_exactly_one() -> None:
    log_ratio = column(-3, 0, 3)[None].expand(3, 3)
    weight = truncated_group_weight(log_ratio, column(0, 0, 0), column(0, 0.5, 1))
    torch.testing.assert_close(
        weight, torch.stack([column(1, 1, 1), column(-1.5, 0, 0).exp(), column(-3, 0, 0).exp()])
    )


def test_one_token_of_a_lonely_age_is_gepos_weight_truncated() -> None:
    """f = 1, one token: p/E, at most 1."""
    p, q, log_e = column(0.3, 0.9).log(), column(0.2, 0.6).log(), column(0.5, 0.5).log()
    weight = truncated_group_weight((p - q)[:, None], q - log_e, column(1, 1))
    torch.testing.assert_close(weight[:, 0], column(0.6, 1.0))


def test_a_completion_counts_its_own_evidence_as_many_tokens_and_the_record_as_two() -> None:
    blended = blended_divergence(column(3, 3, 3), column(1, 1, 1), column(1, 2, 1000))
    torch.testing.assert_close(blended, column(5 / 3, 2, (3000 + 2) / 1002))


def test_the_trust_region_is_a_standard_deviation_of_what_tokens_of_the_age_move() -> None:
    limit = largest_move(column(0, 0.02, 0.08, 5), deviations=1.0, most_nats=0.5)
    torch.testing.assert_close(limit, column(0.03, 0.2, 0.4, 0.5))


def test_a_completion_has_moved_only_the_way_it_is_pushed_and_outliers_hardly_count() -> None:
    log_ratio = torch.stack([column(0.3, 0.3), column(0.3, 0.3), column(-0.3, -0.3), column(30, -0.1)])
    mask = torch.ones(4, 2, dtype=torch.bool)
    moved = has_moved(log_ratio, mask, column(1, -1, -1, 1), limit=column(0.2, 0.2, 0.2, 1.0))
    assert moved.tolist() == [True, False, True, False]


def test_the_prior_of_drift_is_expected_until_drift_is_measured() -> None:
    panel, ages = DivergencePanel(), np.array([[0, 8], [64, 256]])
    supposed = SUPPOSED_NATS_PER_VERSION * ages
    np.testing.assert_allclose(panel.expected("a", ages), supposed, rtol=1e-3)
    for _ in range(50):
        panel.observe([one(name, 0.2, age=64) for name in "ab"] + [one("b", 0.001)])
    after = panel.expected("b", ages)
    assert after[1, 0] == pytest.approx(0.2, abs=0.01)
    assert after[0, 0] == pytest.approx(0.0, abs=0.002)
    # Of 256 versions nothing was seen yet.
    assert after[1, 1] == pytest.approx(supposed[1, 1], abs=0.01)


def test_a_samplers_mismatch_is_expected_of_its_tokens() -> None:
    panel = DivergencePanel()
    for _ in range(50):
        panel.observe([one("odd", 0.1), one("even", 0.001)])
    fresh = np.zeros(3, np.int64)
    assert panel.expected("odd", fresh) == pytest.approx([0.1] * 3, abs=0.01)
    assert panel.expected("even", fresh) == pytest.approx([0.0] * 3, abs=0.005)
    assert panel.expected("new", fresh) == pytest.approx([0.0] * 3, abs=0.005)


def test_every_token_of_a_step_has_what_is_expected_of_its_own_version() -> None:
    groups = made_up_groups(5)
    expected = [
        0.01 * (VERSION - np.concatenate([c.policy_version for c in group.completions])) for group in groups
    ]
    batch = objective_batch(
        groups,
        version=VERSION,
        discount=lambda age: 1.0,
        dtype=torch.float64,
        device=torch.device("cpu"),
        expected_kl_nats=expected,
    )
    assert batch.expected_kl_nats is not None
    assert batch.expected_kl_nats[batch.mask].tolist() == pytest.approx(np.concatenate(expected).tolist())
    ages = [
        (VERSION - completion.policy_version).mean() for group in groups for completion in group.completions
    ]
    assert len(set(ages)) > 1
    assert batch.expected_divergence.tolist() == pytest.approx([0.01 * age for age in ages])


def test_a_step_says_how_much_was_truncated_and_how_far_it_was_trusted(
    tmp_path: Path,
) -> None:
    policy = float64_policy(make_tiny_model(tmp_path / "model", hidden=32, layers=1))
    groups = nearby(made_up_groups(5), policy)
    _, outcome = gradient_step(policy, groups, make_step_settings(objective="drift_aware"))
    assert outcome.numbers.truncated_fraction is not None
    assert 0 < outcome.numbers.truncated_fraction < 1
    assert outcome.numbers.trust_mean is not None
    assert 0 < outcome.numbers.trust_mean < 1
    _, outcome = gradient_step(policy, groups, make_step_settings(objective="gepo"))
    assert outcome.numbers.truncated_fraction is None
    assert outcome.numbers.trust_mean is None
