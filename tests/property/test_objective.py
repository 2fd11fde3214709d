"""Promises of the objective for every group, not only for the worked ones."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.objective.formulas.advantage import centred_advantage
from learner.objective.formulas.divergence import effective_sample_size_ratio, kl_behaviour_learner
from learner.objective.formulas.importance import (
    expectation_weight,
    log_group_expectation,
    log_version_aware_denominator,
    trust_by_sample_size,
)
from learner.objective.formulas.surrogate import clipped_surrogate
from learner.objective.groups import Groups
from support.objective_batches import group_expectation_weight

logprobs = st.floats(min_value=-50, max_value=0, allow_subnormal=False)
rewards = st.floats(min_value=-10, max_value=10)


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Learner and behaviour logprobs of one group."""
    pairs = draw(st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=16))
    return column([p for p, _ in pairs]), column([q for _, q in pairs])


@st.composite
def distributions(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two distributions over the same outcomes, all of them possible."""
    chances = st.floats(min_value=1e-3, max_value=1)
    pairs = draw(st.lists(st.tuples(chances, chances), min_size=2, max_size=8))
    p, q = column([p for p, _ in pairs]), column([q for _, q in pairs])
    return p / p.sum(), q / q.sum()


def gepo_loss(learner_logprob: Tensor, behaviour_logprob: Tensor, reward: Tensor) -> Tensor:
    weight = group_expectation_weight(learner_logprob, behaviour_logprob)
    return clipped_surrogate(weight, centred_advantage(reward), clip_low=0.2, clip_high=0.2).loss.mean()


@given(groups(), st.floats(min_value=-1e4, max_value=1e4))
def test_a_constant_added_to_both_policies_changes_nothing(group: tuple[Tensor, Tensor], c: float) -> None:
    p, q = group
    torch.testing.assert_close(
        group_expectation_weight(p + c, q + c), group_expectation_weight(p, q), rtol=1e-9, atol=0
    )


@given(groups())
def test_the_group_expectation_lies_between_mean_and_maximum(group: tuple[Tensor, Tensor]) -> None:
    _, q = group
    log_e = float(log_group_expectation(q))
    assert float(torch.logsumexp(q, 0)) - math.log(len(q)) <= log_e + 1e-9
    assert log_e <= float(q.max()) + 1e-9


@given(groups())
def test_the_mean_weight_under_the_behaviour_shares_is_the_mean_ratio(group: tuple[Tensor, Tensor]) -> None:
    p, q = group
    share = torch.softmax(q, 0)
    expected = torch.logsumexp(q.log_softmax(0) + p, 0) - log_group_expectation(q)
    actual = (share * group_expectation_weight(p, q)).sum().log()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@given(groups(), st.floats(min_value=0, max_value=1e4))
def test_the_weights_stay_finite_as_one_behaviour_probability_vanishes(
    group: tuple[Tensor, Tensor], drop: float
) -> None:
    p, q = torch.cat([group[0], column([-1.0])]), torch.cat([group[1], column([-1.0])])
    q[0] -= drop
    assert group_expectation_weight(p, q).isfinite().all()


@given(distributions())
def test_the_variance_gain_is_at_least_the_exponential_of_the_divergence(
    pair: tuple[Tensor, Tensor],
) -> None:
    """Theorem 1: Var(p/q) - Var(p/E_q q) >= exp KL(p||q) - (n^2 + 1), for n outcomes."""
    p, q = pair

    def variance(w: Tensor) -> float:
        return float((q * (w - (q * w).sum()) ** 2).sum())

    gain = variance(p / q) - variance(group_expectation_weight(p.log(), q.log()))
    assert gain >= float((p * (p / q).log()).sum().exp()) - (len(p) ** 2 + 1) - 1e-9


@given(st.data())
def test_the_gradient_is_minus_the_weighted_advantage_over_the_group_unless_clipped(
    data: st.DataObject,
) -> None:
    near = st.floats(min_value=-2, max_value=0)
    size = data.draw(st.integers(1, 8))
    p = column(data.draw(st.lists(near, min_size=size, max_size=size))).requires_grad_()
    q = column(data.draw(st.lists(near, min_size=size, max_size=size)))
    reward = column(data.draw(st.lists(rewards, min_size=size, max_size=size)))
    gepo_loss(p, q, reward).backward()  # type: ignore[no-untyped-call]
    w, advantage = group_expectation_weight(p.detach(), q), centred_advantage(reward)
    clipped = ((w > 1.2) & (advantage > 0)) | ((w < 0.8) & (advantage < 0))
    expected = torch.where(clipped, 0.0, -advantage * w / size)
    assert p.grad is not None
    torch.testing.assert_close(p.grad, expected, rtol=1e-9, atol=1e-12)
    # And numerically, where the loss has no kink nearby.
    kinks = torch.stack([(w - 0.8).abs(), (w - 1.2).abs()]).min()
    if kinks > 1e-3:
        assert torch.autograd.gradcheck(lambda lp: gepo_loss(lp, q, reward), (p,), eps=1e-7, atol=1e-4)


@given(groups())
def test_the_divergence_estimate_is_never_negative(group: tuple[Tensor, Tensor]) -> None:
    assert (kl_behaviour_learner(*group) >= 0).all()


@given(st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=32))
def test_the_effective_share_lies_between_one_completion_and_all(weights: list[float]) -> None:
    ratio = effective_sample_size_ratio(column(weights))
    assert 1 / len(weights) - 1e-12 <= ratio <= 1 + 1e-12


@given(groups(), st.floats(0.5, 4))
def test_the_version_aware_denominator_lies_between_a_completion_and_its_group(
    group: tuple[Tensor, Tensor], power: float
) -> None:
    p, q = group
    one = Groups.single(q)
    expectation = log_group_expectation(q, one)
    trust = trust_by_sample_size(p - q, one, power=power)
    denominator = log_version_aware_denominator(q, expectation, trust)
    assert (denominator >= torch.minimum(q, expectation) - 1e-9).all()
    assert (denominator <= torch.maximum(q, expectation) + 1e-9).all()
    assert ((trust >= 0) & (trust < 1)).all()


@given(groups(), st.floats(-5, 5))
def test_a_learner_in_step_with_the_sampler_makes_version_aware_weights_plain(
    group: tuple[Tensor, Tensor], offset: float
) -> None:
    """The same offset for all leaves the group's weights equal, however far it is: nothing to distrust."""
    q = group[1]
    one = Groups.single(q)
    trust = trust_by_sample_size(q + offset - q, one, power=3.0)
    denominator = log_version_aware_denominator(q, log_group_expectation(q, one), trust)
    weight = expectation_weight(q + offset, denominator)
    torch.testing.assert_close(weight, torch.full_like(q, math.exp(offset)), rtol=1e-9, atol=0)
