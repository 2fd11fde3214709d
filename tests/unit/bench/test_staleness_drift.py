"""Drift that the laboratory's learner expects at a token's age, worked by hand."""

import pytest
import torch

from bench.staleness_lab.drift import Drift

MASK = torch.ones(1, 4, 5, dtype=torch.bool)


def test_nothing_is_expected_until_something_old_was_seen() -> None:
    drift, lag = Drift(1), torch.tensor([[0, 0]])
    assert drift.expected(lag) is None
    drift.add(lag, torch.full((1, 4, 5), 0.2), MASK)
    assert drift.expected(lag) is None


def test_divergence_is_expected_in_proportion_to_the_lag() -> None:
    # Half of 0.2 squared is 0.02 nats, over 10 versions 0.002 a version.
    drift = Drift(1)
    drift.add(torch.tensor([[10, 10]]), torch.full((1, 4, 5), 0.2), MASK)
    expected = drift.expected(torch.tensor([[50, 0]]))
    assert expected is not None
    assert expected.tolist() == [pytest.approx([0.1, 0.0])]


def test_a_fresh_group_says_nothing_and_the_past_fades() -> None:
    drift = Drift(1)
    drift.add(torch.tensor([[10, 10]]), torch.full((1, 4, 5), 0.2), MASK)
    drift.add(torch.tensor([[0, 10]]), torch.full((1, 4, 5), 0.4), MASK)
    expected = drift.expected(torch.tensor([[1]]))
    assert expected is not None
    # (0.9 * 0.04 + 0.08) / (0.9 * 20 + 10)
    assert float(expected) == pytest.approx(0.116 / 28)


def test_an_outlier_is_held_and_what_is_not_written_does_not_count() -> None:
    log_ratio = torch.zeros(1, 4, 5)
    log_ratio[0, 0, 0], log_ratio[0, 1, 4] = 9.0, 9.0
    mask = MASK.clone()
    mask[0, 1, 4] = False
    drift = Drift(1)
    drift.add(torch.tensor([[1]]), log_ratio, mask)
    expected = drift.expected(torch.tensor([[1]]))
    assert expected is not None
    assert float(expected) == pytest.approx((2.0**2 / 2) / 19)
