"""GEPO's weight against numbers worked by hand (float64, 1e-9)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from learner.objective.advantage import centred_advantage
from learner.objective.importance import log_group_expectation
from support.objective_batches import group_expectation_weight


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def weights(p: tuple[float, ...], q: tuple[float, ...]) -> Tensor:
    return group_expectation_weight(log(*p), log(*q))


def assert_close(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def test_the_general_case_divides_by_the_group_expectation() -> None:
    assert math.isclose(float(log_group_expectation(log(0.1, 0.2, 0.3, 0.4)).exp()), 0.30, abs_tol=1e-12)
    assert_close(weights((0.2, 0.2, 0.2, 0.4), (0.1, 0.2, 0.3, 0.4)), 2 / 3, 2 / 3, 2 / 3, 4 / 3)


def test_on_policy_the_weight_is_not_one() -> None:
    q = (0.5, 0.8, 0.9, 0.7)
    assert math.isclose(float(log_group_expectation(log(*q)).exp()), 0.7551724138, abs_tol=1e-9)
    assert_close(weights(q, q), 0.6621004566, 1.0593607306, 1.1917808219, 0.9269406393)


def test_a_completion_the_sampler_found_unlikely_keeps_a_moderate_weight() -> None:
    w = weights((0.6, 0.8, 0.9, 0.7), (0.001, 0.8, 0.9, 0.7))
    assert math.isclose(float(w[0]), 0.7425769368, abs_tol=1e-9)  # a plain ratio would be 600


@pytest.mark.parametrize("size", [1, 2, 7])
def test_with_equal_behaviour_probabilities_the_weight_is_the_plain_ratio(size: int) -> None:
    q = log(*[0.3] * size)
    p = torch.linspace(-3, -0.1, size, dtype=torch.float64)
    torch.testing.assert_close(group_expectation_weight(p, q), (p - q).exp(), rtol=1e-12, atol=0)


def test_long_log_probabilities_neither_overflow_nor_vanish() -> None:
    lq = torch.tensor([-120.0, -135.0, -150.0, -128.0], dtype=torch.float64)
    assert math.isclose(float(log_group_expectation(lq)), -120.0003355996, abs_tol=1e-9)
    expected = torch.tensor([1.0003356560, 3.0600500e-7, 9.3607639e-14, 3.3557523e-4], dtype=torch.float64)
    torch.testing.assert_close(group_expectation_weight(lq, lq), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weight_is_finite_at_ten_thousand_nats(dtype: torch.dtype) -> None:
    lq = torch.tensor([-1e4, -1e4 - 1, -1e4 + 2], dtype=dtype)
    w = group_expectation_weight(lq, lq)
    assert w.dtype == dtype
    assert w.isfinite().all()
    assert (w > 0).all()


@pytest.mark.parametrize(
    ("a", "b", "kl", "ratio_variance", "group_variance"),
    [(0.9, 0.1, 1.757780, 7.1111, 0.0856633), (0.7, 0.6, None, 0.0416667, 0.1420118)],
)
def test_population_variances_of_two_bernoulli_policies(
    a: float, b: float, kl: float | None, ratio_variance: float, group_variance: float
) -> None:
    """Far apart, the group expectation tames the variance; close together it adds some."""
    p, q = log(a, 1 - a), log(b, 1 - b)
    # A group that holds each outcome once has the population's expectation as its own.
    for w, expected in (((p - q).exp(), ratio_variance), (group_expectation_weight(p, q), group_variance)):
        mean = (q.exp() * w).sum()
        assert math.isclose(float((q.exp() * (w - mean) ** 2).sum()), expected, abs_tol=5e-5)
    if kl is not None:
        assert math.isclose(float((p.exp() * (p - q)).sum()), kl, abs_tol=1e-6)


def test_the_gradient_flows_through_the_learner_only() -> None:
    p = log(0.2, 0.5).requires_grad_()
    q = log(0.3, 0.4).requires_grad_()
    w = group_expectation_weight(p, q)
    w.sum().backward()  # type: ignore[no-untyped-call]
    assert p.grad is not None
    torch.testing.assert_close(p.grad, w.detach())
    assert q.grad is None


@pytest.mark.parametrize("shape", [(0,), (2, 2), ()])
@pytest.mark.parametrize("of_group", [log_group_expectation, centred_advantage])
def test_shapes_that_are_not_one_group_are_refused(
    of_group: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="shape"):
        of_group(torch.zeros(shape))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_behaviour_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_expectation_weight(torch.zeros(2), torch.tensor([-1.0, bad]))
