"""Numbers worked by hand, formula by formula (float64)."""

import math

import pytest
import torch
from torch import Tensor

from learner.objective.advantage import (
    beta_normalised_advantage,
    centred_advantage,
    leave_one_out_advantage,
    overlong_penalty,
    standardised_advantage,
    whitened_advantage,
)
from learner.objective.batch import ObjectiveBatch
from learner.objective.divergence import (
    chi_square_behaviour_learner,
    completion_divergence,
    group_sample_size_ratio,
    kl_learner_behaviour,
    kl_learner_reference,
)
from learner.objective.gates import (
    delight_gate,
    fading_delight_gate,
    within_band,
    within_second_moment,
    within_total_variation,
)
from learner.objective.groups import Groups
from learner.objective.importance import (
    expectation_weight,
    gamma_weight,
    geometric_mean_weight,
    log_defensive_mixture,
    log_expectation_where_far,
    log_expected_learner,
    log_group_expectation,
    log_group_mean,
    log_linear_proximal,
)
from learner.objective.registry import load_objective
from learner.objective.slow_fast import reposition, slow_fast_step
from learner.objective.staleness import learning_rate_factor, polynomial_discount, sample_size_discount
from learner.objective.surrogate import decoupled_surrogate
from learner.objective.version_aware import (
    log_version_aware_denominator,
    trust_by_divergence,
    trust_by_sample_size,
)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log(*probabilities: float) -> Tensor:
    return column(*probabilities).log()


def assert_close(actual: Tensor, *expected: float, atol: float = 1e-9) -> None:
    torch.testing.assert_close(actual, column(*expected), rtol=0, atol=atol)


def single_tokens(p: Tensor, q: Tensor, reward: Tensor, proximal: Tensor | None = None) -> ObjectiveBatch:
    """Completions of one token, one prompt."""
    return ObjectiveBatch(
        learner_logprob=p[:, None].clone().requires_grad_(),
        behaviour_logprob=q[:, None],
        mask=torch.ones(len(p), 1, dtype=torch.bool),
        group_index=torch.zeros(len(p), dtype=torch.int64),
        reward=reward,
        staleness_versions=torch.zeros(len(p)),
        max_tokens=1,
        proximal_logprob=None if proximal is None else proximal[:, None],
    )


def test_advantages_of_two_good_and_two_bad() -> None:
    reward = column(1, 0, 0, 1)
    assert_close(centred_advantage(reward), 0.5, -0.5, -0.5, 0.5)
    assert_close(leave_one_out_advantage(reward), 2 / 3, -2 / 3, -2 / 3, 2 / 3)
    a = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert_close(standardised_advantage(reward), a, -a, -a, a, atol=1e-12)
    published = standardised_advantage(reward, epsilon=1e-6)
    assert_close(published, 0.866024, -0.866024, -0.866024, 0.866024, atol=5e-7)
    w = 0.5 / math.sqrt(1 / 3 + 1e-8)
    assert_close(whitened_advantage(reward), w, -w, -w, w, atol=1e-12)


def test_one_completion_alone_has_no_advantage() -> None:
    for advantage in (centred_advantage, standardised_advantage, leave_one_out_advantage, whitened_advantage):
        assert advantage(column(0.7)).tolist() == [0.0]


def test_rewards_are_compared_within_their_own_prompt() -> None:
    groups = Groups.of(torch.tensor([7, 3, 7, 3]))
    assert_close(centred_advantage(column(1, 10, 3, 20), groups), -1, -5, 1, 5)


def test_beta_normalisation_divides_by_the_density_at_the_mean_reward() -> None:
    """Means 1/4 and 3/4: variance 1/8, a = b = 1/2, so alpha = beta = 7/6."""
    reward, groups = column(1, 0, 0, 0, 1, 1, 1, 0), Groups.of(torch.tensor([0] * 4 + [1] * 4))
    normaliser = math.gamma(7 / 3) / math.gamma(7 / 6) ** 2
    density = normaliser * (0.25 * 0.75) ** (1 / 6)
    expected = centred_advantage(reward, groups) / density
    torch.testing.assert_close(beta_normalised_advantage(reward, groups), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("reward", [[1.0, 0, 0, 0], [0.0, 0, 0, 0], [1.0, 1, 1, 1]])
def test_without_a_spread_of_means_beta_normalisation_changes_nothing(reward: list[float]) -> None:
    values = column(*reward)
    one = Groups.single(values)
    assert torch.equal(beta_normalised_advantage(values, one), centred_advantage(values))


def test_groups_of_equal_rewards_have_no_advantage_where_the_density_is_zero() -> None:
    reward, groups = column(1, 1, 0, 0, 1, 0), Groups.of(torch.tensor([0, 0, 1, 1, 2, 2]))
    advantage = beta_normalised_advantage(reward, groups)
    assert advantage.isfinite().all()
    assert advantage[:4].tolist() == [0.0] * 4


def test_beta_normalisation_refuses_rewards_that_are_no_shares() -> None:
    with pytest.raises(ValueError, match="0, 1"):
        beta_normalised_advantage(column(0, 2), Groups.single(column(0, 2)))


def test_the_last_fifth_of_the_token_limit_costs_up_to_one() -> None:
    penalty = overlong_penalty(column(79, 80, 90, 100, 120), max_tokens=100, buffer_share=0.2)
    assert_close(penalty, 0, 0, -0.5, -1, -1)
    assert overlong_penalty(column(100), max_tokens=100, buffer_share=0).tolist() == [0.0]


def test_denominators_of_the_general_case() -> None:
    """q = (.1, .2, .3, .4), p = (.2, .2, .2, .4): E = .30, mean q = .25, sum q-hat p = .28."""
    p, q = log(0.2, 0.2, 0.2, 0.4), log(0.1, 0.2, 0.3, 0.4)
    assert_close(log_group_expectation(q).exp()[None], 0.30)
    assert_close(log_group_mean(q).exp()[None], 0.25)
    assert_close(log_expected_learner(p, q).exp()[None], 0.28)
    assert_close(expectation_weight(p, log_group_expectation(q)), 2 / 3, 2 / 3, 2 / 3, 4 / 3)
    assert_close(log_defensive_mixture(p, q, share=0.25).exp(), 0.125, 0.2, 0.275, 0.4)
    assert_close(geometric_mean_weight((p - q)[:, None], torch.ones(4, 1, dtype=torch.bool)), 2, 1, 2 / 3, 1)


def test_each_prompt_has_its_own_expectation() -> None:
    groups = Groups.of(torch.tensor([1, 0, 1, 0]))
    assert_close(log_group_expectation(log(0.1, 0.5, 0.3, 0.5), groups).exp(), 0.25, 0.5, 0.25, 0.5)


def test_no_defensive_weight_exceeds_one_over_the_share() -> None:
    p, q = log(0.6, 0.5), column(-700, -0.1)
    weight = expectation_weight(p, log_defensive_mixture(p, q, share=0.2))
    assert float(weight[0]) == pytest.approx(5.0)


def test_only_far_completions_get_the_group_expectation() -> None:
    q, e = column(-1, -2), column(-1.5, -1.5)
    assert_close(log_expectation_where_far(q, e, column(0.01, 0.011), threshold=0.01), -1, -1.5)


def test_the_version_aware_denominator_is_q_on_policy_and_the_expectation_far_away() -> None:
    q = log(0.5, 0.8, 0.9, 0.7)
    groups, e = Groups.single(q), log_group_expectation(q).expand(4)
    on_policy = trust_by_sample_size(q - q, groups, power=2.0)
    assert_close(on_policy, 0, 0, 0, 0)
    assert_close(expectation_weight(q, log_version_aware_denominator(q, e, on_policy)), 1, 1, 1, 1)
    one_left = trust_by_sample_size(column(0, -900, -900, -900), groups, power=2.0)
    assert_close(one_left, *[0.75**2] * 4)
    torch.testing.assert_close(log_version_aware_denominator(q, e, torch.ones(4)), e)
    assert_close(trust_by_divergence(column(0, 0.5, 5000), scale_nats=0.5), 0, 1 - 1 / math.e, 1)


def test_trust_in_the_group_follows_its_effective_sample_size() -> None:
    """Weights 1, 1, 1, 5: ESS = 64 / 28."""
    weights, groups = log(1, 1, 1, 5), Groups.of(torch.tensor([4, 4, 4, 4]))
    assert_close(group_sample_size_ratio(weights, groups), *[64 / 28 / 4] * 4)
    assert_close(sample_size_discount(weights + 800, groups), *[64 / 28 / 4] * 4)


def test_the_learning_rate_follows_the_effective_sample_size() -> None:
    assert math.isclose(learning_rate_factor(column(1, 1, 1, 5)), 0.755929, abs_tol=1e-6)
    assert learning_rate_factor(column(3, 3)) == 1.0


@pytest.mark.parametrize(
    ("staleness", "power", "expected"), [(0, 0.5, 1), (3, 0.5, 0.5), (15, 0.5, 0.25), (9, 0, 1)]
)
def test_the_polynomial_discount(staleness: int, power: float, expected: float) -> None:
    assert math.isclose(polynomial_discount(staleness, power=power), expected)


def test_slow_fast_on_a_parabola() -> None:
    """(1/2) theta^2 from 1 at rate .1: .729 after three steps, .7832 repositioned, .70488 in the end."""
    theta = column(1.0)
    seen = []

    def step() -> None:
        seen.append(float(theta))
        theta.mul_(0.9)

    slow_fast_step([theta], step, fast_steps=3, reposition_share=0.8)
    assert seen == pytest.approx([1, 0.9, 0.81, 0.7832])
    assert float(theta) == pytest.approx(0.70488)


def test_a_reposition_of_nothing_is_a_return() -> None:
    theta = column(3.0)
    reposition([theta], [column(0.1)], share=0.0)
    assert theta.tolist() == [0.1]


def test_the_second_moment_drops_the_fourth_token_then_the_third() -> None:
    logs = column(0.05, -0.1, 0.6, -0.9, 0.02)[None]
    mask = torch.ones(1, 5, dtype=torch.bool)
    stays = within_second_moment(logs, mask, limit=0.04)
    assert stays.tolist() == [[True, True, False, False, True]]
    assert math.isclose(float((logs[stays] ** 2).mean()), 0.0043)
    assert within_second_moment(logs, mask, limit=0.2).tolist() == [[True, True, True, False, True]]
    assert not within_second_moment(column(1, -1)[None], torch.ones(1, 2, dtype=torch.bool), limit=0.04).any()


def test_the_delight_gate() -> None:
    gate = delight_gate(log(0.01, 0.01, 0.9)[:, None], column(1, -1, -0.5), temperature=1.0)
    assert_close(gate[:, 0], 0.990099, 0.009901, 0.486833, atol=1e-6)


def test_the_fading_gate_is_one_on_policy_and_twice_the_delight_gate_far_from_it() -> None:
    p, advantage = log(0.01, 0.01, 0.9), column(1, -1, -0.5)
    gates = [fading_delight_gate(p, advantage, torch.full((3,), f), temperature=1.0) for f in (0, 0.5, 1)]
    assert_close(gates[0], 1, 1, 1, atol=0)
    assert_close(gates[2], 2 * 0.990099, 2 * 0.009901, 2 * 0.486833, atol=2e-6)
    assert_close(gates[1], math.sqrt(1 / 0.505), math.sqrt(0.01 / 0.505), math.sqrt(2 / (1 + 0.9**-0.5)))
    far = fading_delight_gate(column(-5000, -5000), column(1, -1), column(1, 1), temperature=1.0)
    assert_close(far, 2, 0)


def test_the_version_aware_objective_of_two_completions() -> None:
    """q = (.4, .2), p = (.4, .6): p/q = (1, 3), ESS/size = .8, f = .2, a = .008, E = 1/3."""
    outcome = load_objective("version_aware")(single_tokens(log(0.4, 0.6), log(0.4, 0.2), column(0, 1)))
    weight = (0.4 / (0.4**0.992 * 3**-0.008), 0.6 / (0.2**0.992 * 3**-0.008))
    assert_close(outcome.weight, *weight)
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    gate = (2 / (1 + 0.4**-a)) ** 0.2, (2 / (1 + 0.6**a)) ** 0.2
    assert_close(outcome.loss[None], (weight[0] * a * gate[0] - 1.2 * a * gate[1]) / 2)
    assert outcome.is_clipped.tolist() == [False, True]


def test_total_variation_stops_only_what_moves_on_the_way_it_is_pushed() -> None:
    p, q = log(0.5, 0.5, 0.1, 0.1)[:, None], log(0.2, 0.2, 0.4, 0.4)[:, None]
    inside = within_total_variation(p, q, column(1, -1, 1, -1), limit=0.2)
    assert inside[:, 0].tolist() == [False, True, True, False]


def test_a_band_has_both_its_ends() -> None:
    assert within_band(log(0.49, 0.5, 2, 5, 5.1), least=0.5, most=5.0).tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("is_good", "objective_value", "slope"), [(True, 2.4, 0.0), (False, -3.0, -3.0)])
def test_decoupled_ppo_at_six_four_two_tenths(is_good: bool, objective_value: float, slope: float) -> None:
    """p, prox, q = .6, .4, .2: prox/q = 2, u = 1.5. The second completion makes the first's advantage."""
    reward = column(1, 0) if is_good else column(0, 1)
    batch = single_tokens(log(0.6, 0.4), log(0.2, 0.4), reward, proximal=log(0.4, 0.4))
    scale = abs(float(standardised_advantage(reward)[0]))
    outcome = load_objective("decoupled_ppo")(batch)
    (gradient,) = torch.autograd.grad(outcome.loss, batch.learner_logprob)
    other = -1.0 if is_good else 1.0  # u = 1, prox/q = 1
    assert outcome.loss.item() * 2 / -scale == pytest.approx(objective_value + other)
    assert float(gradient[0, 0]) * 2 / -scale == pytest.approx(slope)


@pytest.mark.parametrize(("advantage", "objective_value", "slope"), [(1, 2.4, 0.0), (-1, -3.0, -3.0)])
def test_the_decoupled_surrogate_at_six_four_two_tenths(
    advantage: float, objective_value: float, slope: float
) -> None:
    p = log(0.6).requires_grad_()
    surrogate = decoupled_surrogate(p, log(0.4), log(0.2), column(advantage), clip_low=0.2, clip_high=0.2)
    assert_close(-surrogate.loss.detach(), objective_value)
    assert_close(-torch.autograd.grad(surrogate.loss, p)[0], slope)


def test_vespo_weighs_one_at_one_and_nothing_at_both_ends() -> None:
    weight = gamma_weight(column(0, -30, 30, math.log(2)), power=column(2, 2, 2, 3), rate=column(3, 3, 3, 2))
    assert_close(weight, 1, 0, 0, 8 * math.exp(-2), atol=1e-12)


def test_the_proximal_policy_lies_one_version_before_the_learner() -> None:
    p, q = column(-1, -1, -1, -1)[:, None], column(-3, -3, -3, -3)[:, None]
    proximal = log_linear_proximal(p, q, torch.tensor([0, 1, 2, 10]))
    assert_close(proximal[:, 0], -3, -3, -2, -1.2)


P, Q, REFERENCE = log(0.5, 0.3, 0.2), log(0.2, 0.2, 0.6), log(0.1, 0.6, 0.3)


def under(q: Tensor, values: Tensor) -> float:
    return float((q.exp() * values).sum())


def test_divergences_average_to_their_names() -> None:
    """Expectations under q, taken exactly over a three-letter alphabet."""
    assert under(Q, kl_learner_behaviour(P, Q)) == pytest.approx(float((P.exp() * (P - Q)).sum()))
    assert under(Q, kl_learner_reference(P, REFERENCE, Q)) == pytest.approx(
        float((P.exp() * (P - REFERENCE)).sum())
    )
    chi = float(((Q.exp() - P.exp()) ** 2 / P.exp()).sum())
    assert under(Q, chi_square_behaviour_learner(P, Q)) == pytest.approx(chi)


@pytest.mark.parametrize("other", [Q, REFERENCE])
def test_penalties_average_to_the_gradient_of_the_divergence(other: Tensor) -> None:
    """Not only in value: the expectation of d penalty / d logits is d KL / d logits."""
    logits = P.clone().requires_grad_()
    learner = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((learner.exp() * (learner - other)).sum(), logits, retain_graph=True)[0]
    estimate = kl_learner_reference(learner, other, Q)
    (estimated,) = torch.autograd.grad((Q.exp() * estimate).sum(), logits, retain_graph=True)
    torch.testing.assert_close(estimated, exact, rtol=1e-10, atol=1e-12)
    if other is Q:
        again = torch.autograd.grad((Q.exp() * kl_learner_behaviour(learner, Q)).sum(), logits)[0]
        torch.testing.assert_close(again, exact, rtol=1e-10, atol=1e-12)


def test_a_completion_diverges_by_the_mean_over_its_own_tokens() -> None:
    p, q = torch.stack([log(0.5, 0.3), column(-1, math.nan)]), torch.stack([log(0.2, 0.3), column(-1, 7)])
    mask = torch.tensor([[True, True], [True, False]])
    assert_close(completion_divergence(p, q, mask), (2.5 - math.log(2.5) - 1) / 2, 0)
