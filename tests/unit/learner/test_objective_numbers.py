"""Numbers worked by hand, formula by formula (float64)."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from learner.objective.entropy_switch import EntropySwitch
from learner.objective.formulas.advantage import (
    centred_advantage,
    leave_one_out_advantage,
    overlong_penalty,
    standardised_advantage,
    whitened_advantage,
)
from learner.objective.formulas.age_discounts import (
    polynomial_discount,
    sequence_learning_rate_factor,
    version_discount,
)
from learner.objective.formulas.divergence import (
    completion_divergence,
    effective_sample_size_ratio,
    group_sample_size_ratio,
    kl_behaviour_learner,
    kl_learner_reference,
    kl_penalty,
)
from learner.objective.formulas.importance import (
    expectation_weight,
    geometric_mean_weight,
    log_defensive_mixture,
    log_expected_learner,
    log_group_expectation,
    log_group_mean,
    log_version_aware_denominator,
    trust_by_divergence,
    trust_by_sample_size,
)
from learner.objective.formulas.surrogate import (
    Surrogate,
    clipped_surrogate,
    decoupled_surrogate,
)
from learner.objective.formulas.trust_regions import (
    delight_gate,
    within_band,
)
from learner.objective.groups import Groups
from learner.objective.registry import load_objective
from learner.objective.slow_fast import slow_fast_step
from support.objective_batches import group_expectation_weight, whole_rows
from support.refusals import naming


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log(*probabilities: float) -> Tensor:
    return column(*probabilities).log()


LIKELY, TINY = log(0.5, 0.8, 0.9, 0.7), column(-120, -135, -150, -128)


def assert_close(actual: Tensor, *expected: float, atol: float = 1e-9) -> None:
    torch.testing.assert_close(actual, column(*expected), rtol=0, atol=atol)


def test_advantages_of_two_good_and_two_bad() -> None:
    reward = column(1, 0, 0, 1)
    assert_close(centred_advantage(reward), 0.5, -0.5, -0.5, 0.5)
    assert_close(leave_one_out_advantage(reward), 2 / 3, -2 / 3, -2 / 3, 2 / 3)
    gains = column(1, 0.63093, 0.5)
    assert_close(leave_one_out_advantage(gains), 0.434535, -0.119070, -0.315465, atol=1e-6)
    a = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert_close(standardised_advantage(reward), a, -a, -a, a, atol=1e-12)
    published = standardised_advantage(reward, epsilon=1e-6)
    assert_close(published, 0.866024, -0.866024, -0.866024, 0.866024, atol=5e-7)
    w = 0.5 / math.sqrt(1 / 3 + 1e-8)
    assert_close(whitened_advantage(reward), w, -w, -w, w, atol=1e-12)


def test_one_completion_alone_has_no_advantage() -> None:
    for advantage in (centred_advantage, standardised_advantage, leave_one_out_advantage, whitened_advantage):
        assert advantage(column(0.7)).tolist() == [0.0]


def test_the_last_fifth_of_the_token_limit_costs_up_to_one() -> None:
    penalty = overlong_penalty(column(79, 80, 90, 100, 120), max_tokens=100, buffer_share=0.2)
    assert_close(penalty, 0, 0, -0.5, -1, -1)
    assert overlong_penalty(column(100), max_tokens=100, buffer_share=0).tolist() == [0.0]


@pytest.mark.parametrize(
    ("p", "q", "weights"),
    [
        (log(0.2, 0.2, 0.2, 0.4), log(0.1, 0.2, 0.3, 0.4), (2 / 3, 2 / 3, 2 / 3, 4 / 3)),
        (LIKELY, LIKELY, (0.6621004566, 1.0593607306, 1.1917808219, 0.9269406393)),
        (
            log(0.6, 0.8, 0.9, 0.7),
            log(0.001, 0.8, 0.9, 0.7),
            (0.7425769368, 0.9901025824, 1.1138654052, 0.8663397597),
        ),
        (TINY, TINY, (1.0003356560, 3.0600500e-7, 9.3607639e-14, 3.3557523e-4)),
        (TINY - 1e4, TINY - 1e4, (1.0003356560, 3.0600500e-7, 9.3607639e-14, 3.3557523e-4)),
        (log(0.6), log(0.2), (3,)),
        (log(0.3, 0.6), log(0.2, 0.2), (1.5, 3)),
    ],
    ids=["general", "on policy", "one q is tiny", "tiny", "beyond any float", "one alone", "equal q"],
)
def test_the_weights_of_gepo(p: Tensor, q: Tensor, weights: tuple[float, ...]) -> None:
    torch.testing.assert_close(group_expectation_weight(p, q), column(*weights), rtol=1e-8, atol=0)


def test_a_threshold_of_zero_leaves_gepo_on_policy_too() -> None:
    batch = whole_rows(LIKELY[:, None], LIKELY[:, None], column(1, 0, 0, 1))
    plus = load_objective("gepo_plus", {"threshold_nats": 0.0})(batch)
    assert_close(plus.weight, *group_expectation_weight(LIKELY, LIKELY).tolist())


def test_denominators_of_the_general_case() -> None:
    """q = (.1, .2, .3, .4), p = (.2, .2, .2, .4): E = .30, mean q = .25, sum q-hat p = .28."""
    p, q = log(0.2, 0.2, 0.2, 0.4), log(0.1, 0.2, 0.3, 0.4)
    assert_close(log_group_expectation(q).exp()[None], 0.30)
    assert_close(log_group_mean(q).exp()[None], 0.25)
    assert_close(log_expected_learner(p, q).exp()[None], 0.28)
    assert_close(log_defensive_mixture(p, q, share=0.25).exp(), 0.125, 0.2, 0.275, 0.4)
    assert_close(geometric_mean_weight((p - q)[:, None], torch.ones(4, 1, dtype=torch.bool)), 2, 1, 2 / 3, 1)


def test_no_defensive_weight_exceeds_one_over_the_share() -> None:
    p, q = log(0.6, 0.5), column(-700, -0.1)
    weight = expectation_weight(p, log_defensive_mixture(p, q, share=0.2))
    assert float(weight[0]) == pytest.approx(5.0)


def test_the_group_is_not_trusted_on_policy_and_as_much_as_is_lost_far_away() -> None:
    groups, e = Groups.single(LIKELY), log_group_expectation(LIKELY).expand(4)
    on_policy = trust_by_sample_size(LIKELY - LIKELY, groups, power=2.0)
    assert_close(log_version_aware_denominator(LIKELY, e, on_policy), *LIKELY.tolist())
    assert_close(trust_by_sample_size(column(0, -900, -900, -900), groups, power=2.0), *[0.75**2] * 4)
    torch.testing.assert_close(log_version_aware_denominator(LIKELY, e, torch.ones(4)), e)
    assert_close(trust_by_divergence(column(0, 0.5, 5000), scale_nats=0.5), 0, 1 - 1 / math.e, 1)


def test_trust_in_the_group_follows_its_effective_sample_size() -> None:
    """Weights 1, 1, 1, 5: ESS = 64 / 28."""
    weights, groups = log(1, 1, 1, 5), Groups.of(torch.tensor([4, 4, 4, 4]))
    assert_close(group_sample_size_ratio(weights, groups), *[64 / 28 / 4] * 4)
    assert_close(group_sample_size_ratio(weights + 800, groups), *[64 / 28 / 4] * 4)


def test_the_learning_rate_follows_the_effective_sample_size() -> None:
    assert math.isclose(sequence_learning_rate_factor(log(1, 1, 1, 5)), 0.755929, abs_tol=1e-6)
    assert math.isclose(sequence_learning_rate_factor(log(3, 3)), 1.0)
    # Of whole completions, whose weights may be beyond any float: only their quotients count.
    assert math.isclose(sequence_learning_rate_factor(log(1, 1, 1, 5) + 4e5), 0.755929, abs_tol=1e-6)
    assert math.isclose(sequence_learning_rate_factor(column(0, -1e4, -1e4, -1e4)), 0.5)


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


def test_fast_steps_end_for_good_when_the_entropy_jumps() -> None:
    """(1, 1, 2): mean 4/3, deviation sqrt(2)/3, score sqrt(2)."""
    switch = EntropySwitch(window=3, threshold=1.0).observe(1.0).observe(1.0)
    assert switch.score == 0.0
    falling = switch.observe(0.5)
    assert falling.score == pytest.approx(-math.sqrt(2))
    assert falling.is_on
    jumped = switch.observe(2.0)
    assert jumped.score == pytest.approx(math.sqrt(2))
    assert not jumped.is_on
    calm = jumped.observe(2.0).observe(2.0)
    assert calm.entropies == (2.0, 2.0, 2.0)
    assert calm.score == 0.0
    assert not calm.is_on


def test_the_delight_gate() -> None:
    gate = delight_gate(log(0.01, 0.01, 0.9)[:, None], column(1, -1, -0.5), temperature=1.0)
    assert_close(gate[:, 0], 0.990099, 0.009901, 0.486833, atol=1e-6)


def test_a_band_has_both_its_ends() -> None:
    stays = within_band(log(0.49, 0.5, 2, 5, 5.1), least=0.5, most=5.0)
    assert stays.tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(("advantage", "objective_value", "slope"), [(1, 2.4, 0.0), (-1, -3.0, -3.0)])
def test_the_decoupled_surrogate_at_six_four_two_tenths(
    advantage: float, objective_value: float, slope: float
) -> None:
    p = log(0.6).requires_grad_()
    surrogate = decoupled_surrogate(p, log(0.4), log(0.2), column(advantage), clip_low=0.2, clip_high=0.2)
    assert_close(-surrogate.loss.detach(), objective_value)
    assert_close(-torch.autograd.grad(surrogate.loss, p)[0], slope)


P, Q, REFERENCE = log(0.5, 0.3, 0.2), log(0.2, 0.2, 0.6), log(0.1, 0.6, 0.3)


def under(q: Tensor, values: Tensor) -> float:
    return float((q.exp() * values).sum())


def test_divergences_average_to_their_names() -> None:
    """Expectations under q, taken exactly over a three-letter alphabet."""
    assert under(Q, kl_learner_reference(P, REFERENCE, Q)) == pytest.approx(under(P, P - REFERENCE))
    assert under(Q, kl_behaviour_learner(P, Q)) == pytest.approx(under(Q, Q - P), abs=1e-12)


@pytest.mark.parametrize("other", [Q, REFERENCE])
def test_penalties_average_to_the_gradient_of_the_divergence(other: Tensor) -> None:
    """Not only in value: the expectation of d penalty / d logits is d KL / d logits."""
    logits = P.clone().requires_grad_()
    learner = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((learner.exp() * (learner - other)).sum(), logits, retain_graph=True)[0]
    estimate = kl_learner_reference(learner, other, Q)
    (estimated,) = torch.autograd.grad((Q.exp() * estimate).sum(), logits)
    torch.testing.assert_close(estimated, exact, rtol=1e-10, atol=1e-12)


def test_the_penalty_is_k3_up_to_twice_the_ratio_and_its_tangent_beyond() -> None:
    """At p/q = 1/2, 2, 4: log 2 - 1/2, 1 - log 2, 1; slopes p/q - 1, but never above 1."""
    p = log(0.1, 0.2, 0.4, 0.8).requires_grad_()
    penalty = kl_penalty(p, log(0.2, 0.2, 0.2, 0.2))
    assert_close(penalty.detach(), math.log(2) - 0.5, 0, 1 - math.log(2), 1)
    assert_close(torch.autograd.grad(penalty.sum(), p)[0], -0.5, 0, 1, 1)
    far = column(-1, -1e4).requires_grad_()
    penalty = kl_penalty(far, column(-30, -1))
    assert_close(torch.autograd.grad(penalty.sum(), far)[0], 1, -1)


def test_the_penalty_has_the_gradient_of_the_divergence_where_no_ratio_exceeds_two() -> None:
    """And beyond it is off by E_p[(1 - 2q/p)+ grad log p]."""
    logits, q = log(0.35, 0.35, 0.3).requires_grad_(), log(0.2, 0.3, 0.5)
    learner = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((q.exp() * (q - learner)).sum(), logits, retain_graph=True)[0]
    (estimated,) = torch.autograd.grad((q.exp() * kl_penalty(learner, q)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(estimated, exact, rtol=1e-10, atol=1e-12)
    narrow = log(0.1, 0.4, 0.5)  # the first is 3.5 times as likely now
    exact = torch.autograd.grad((narrow.exp() * (narrow - learner)).sum(), logits, retain_graph=True)[0]
    (off,) = torch.autograd.grad((narrow.exp() * kl_penalty(learner, narrow)).sum(), logits)
    scores = torch.eye(3, dtype=torch.float64)[0] - learner.detach().exp()
    assert_close(exact - off, *(0.35 * (1 - 0.2 / 0.35) * scores).tolist())


def test_a_completion_diverges_by_the_mean_over_its_own_tokens() -> None:
    p, q = torch.stack([log(0.5, 0.3), column(-1, math.nan)]), torch.stack([log(0.2, 0.3), column(-1, 7)])
    mask = torch.tensor([[True, True], [True, False]])
    assert_close(completion_divergence(p, q, mask), (2.5 - math.log(2.5) - 1) / 2, 0)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -7.3, 1e6])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(value: float, size: int) -> None:
    assert torch.equal(centred_advantage(torch.full((size,), value)), torch.zeros(size))


@pytest.mark.parametrize(
    ("weights", "expected"), [([1.0, 1.0, 1.0, 5.0], 2.285714 / 4), ([3.0, 3.0], 1.0), ([1e200, 1e200], 1.0)]
)
def test_unequal_weights_leave_fewer_completions_in_effect(weights: list[float], expected: float) -> None:
    ratio = effective_sample_size_ratio(torch.tensor(weights, dtype=torch.float64))
    assert math.isclose(ratio, expected, rel_tol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (2, 2), ()])
@pytest.mark.parametrize("of_group", [log_group_expectation, centred_advantage])
def test_shapes_that_are_not_one_group_are_refused(
    of_group: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    with naming(ValueError, str(shape)):
        of_group(torch.zeros(shape))


@pytest.mark.parametrize(
    ("staleness", "half_life", "expected"),
    [(0, 4.0, 1.0), (4, 4.0, 0.5), (8, 4.0, 0.25), (2, 4.0, math.sqrt(0.5)), (64, math.inf, 1.0)],
)
def test_the_discount_halves_every_half_life(staleness: int, half_life: float, expected: float) -> None:
    assert math.isclose(version_discount(staleness, half_life_versions=half_life), expected, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("advantage", "dual_clip", "loss", "clipped_ones"),
    [
        (1, math.inf, [-0.5, -0.9, -1, -1.1, -1.2, -1.2], [4, 5]),
        (-1, math.inf, [0.8, 0.9, 1, 1.1, 2, 8], [0]),
        (1, 3.0, [-0.5, -0.9, -1, -1.1, -1.2, -1.2], [4, 5]),
        (-1, 3.0, [0.8, 0.9, 1, 1.1, 2, 3], [0, 5]),
        (0, 3.0, [0] * 6, []),
    ],
)
def test_only_moves_that_went_far_enough_are_clipped_and_a_dual_clip_bounds_what_a_bad_one_costs(
    advantage: float, dual_clip: float, loss: list[float], clipped_ones: list[int]
) -> None:
    weight = column(0.5, 0.9, 1, 1.1, 2, 8).requires_grad_()
    surrogate = clipped_surrogate(
        weight, torch.full_like(weight, advantage), clip_low=0.2, clip_high=0.2, dual_clip=dual_clip
    )
    assert_close(surrogate.loss.detach(), *loss, atol=1e-12)
    assert surrogate.is_clipped.nonzero().flatten().tolist() == clipped_ones
    (slopes,) = torch.autograd.grad(surrogate.loss.sum(), weight)
    assert slopes.tolist() == [0 if place in clipped_ones else -advantage for place in range(6)]


def clipped(weight: Tensor | None = None, **changes: float) -> Surrogate:
    clips = {"clip_low": 0.2, "clip_high": 0.2} | changes
    return clipped_surrogate(torch.ones(2) if weight is None else weight, torch.ones(2), **clips)


@pytest.mark.parametrize(
    ("refused", "names"),
    [
        *((partial(effective_sample_size_ratio, torch.tensor(none)), ["0"]) for none in ([], [0.0, 0.0])),
        *(
            (partial(log_group_expectation, torch.tensor([-1.0, bad])), ["behaviour_logprob", str(bad)])
            for bad in (math.nan, math.inf, -math.inf)
        ),
        (partial(kl_behaviour_learner, torch.zeros(2), torch.zeros(3)), ["(2,)", "(3,)"]),
        *(
            (partial(version_discount, age, half_life_versions=half_life), ["versions", str(named)])
            for age, half_life, named in ((-1, 4.0, -1), (1, 0.0, 0.0), (1, -2.0, -2.0), (1, math.nan, "nan"))
        ),
        *((partial(clipped, clip_low=low), ["clip_low", str(low)]) for low in (0.0, 1.1, -0.2, math.nan)),
        *((partial(clipped, clip_high=high), ["clip_high", str(high)]) for high in (0.0, math.nan)),
        *((partial(clipped, dual_clip=dual), ["dual_clip", str(dual)]) for dual in (1.0, 0.5, math.nan)),
        (partial(clipped, torch.ones(1)), ["(1,)", "(2,)"]),
        # A clip at 1.2 in bfloat16 is one at 1.203, and the ratio of two logprobs near -8 is off by 3 %.
        *(
            (partial(clipped, torch.ones(2, dtype=dtype)), [str(dtype), "float32"])
            for dtype in (torch.bfloat16, torch.float16)
        ),
    ],
)
def test_what_no_formula_takes_is_refused_by_name(refused: Callable[[], object], names: list[str]) -> None:
    with naming(ValueError, *names):
        refused()
