import math

import pytest
import torch

from learner.objective.divergence import effective_sample_size_ratio, kl_behaviour_learner


def test_the_estimate_averages_to_the_divergence_of_behaviour_from_learner() -> None:
    """The expectation of k3 under q, taken exactly over a three-letter alphabet."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    estimate = (q * kl_behaviour_learner(p.log(), q.log())).sum()
    assert math.isclose(float(estimate), float((q * (q / p).log()).sum()), abs_tol=1e-12)


def test_equal_policies_diverge_by_zero_with_zero_gradient() -> None:
    lp = torch.tensor([-0.1, -5.0], dtype=torch.float64, requires_grad=True)
    divergence = kl_behaviour_learner(lp, lp.detach())
    divergence.sum().backward()  # type: ignore[no-untyped-call]
    assert divergence.tolist() == [0.0, 0.0]
    assert lp.grad is not None
    assert lp.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("weights", "expected"), [([1.0, 1.0, 1.0, 5.0], 2.285714 / 4), ([3.0, 3.0], 1.0), ([1e200, 1e200], 1.0)]
)
def test_unequal_weights_leave_fewer_completions_in_effect(weights: list[float], expected: float) -> None:
    ratio = effective_sample_size_ratio(torch.tensor(weights, dtype=torch.float64))
    assert math.isclose(ratio, expected, rel_tol=1e-6)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0]])
def test_no_weight_has_no_effective_sample_size(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        effective_sample_size_ratio(torch.tensor(weights))


def test_divergence_needs_equal_shapes() -> None:
    with pytest.raises(ValueError, match="shape"):
        kl_behaviour_learner(torch.zeros(2), torch.zeros(3))
