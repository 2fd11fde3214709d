"""The numbers of the report, against numbers worked by hand."""

import numpy as np
import pytest

from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.plan import chosen_rates, last_scores
from bench.staleness_lab.statistics import (
    Table,
    best_scores,
    collapsed_share,
    comparison,
    gaps,
    rank_correlation,
)

RISES_AND_FALLS = (0.0, 0.9, 0.9, 0.9, 0.3, 0.3, 0.3)
RISES = (0.0, 0.2, 0.4, 0.6, 0.9, 0.9, 0.9)


def outcome(*scores: tuple[float, ...], rate: float = 1e-3, staleness: int = 0) -> Outcome:
    """An outcome of which only the scores matter."""
    cell = Cell("tune", "digits", "gepo", "", "fixed", staleness, rate, tuple(range(len(scores))), 10)
    return Outcome(cell=cell, scores=scores, measures={}, skipped=0.0, seconds=0.0)


def test_best_and_last_are_means_of_three_evaluations() -> None:
    scores = (RISES_AND_FALLS, RISES)
    assert best_scores(scores) == pytest.approx([0.9, 0.9])
    assert last_scores(scores) == pytest.approx([0.3, 0.9])
    assert gaps(outcome(*scores)) == pytest.approx([0.6, 0.0])


def test_a_run_that_ends_far_below_its_best_has_collapsed() -> None:
    assert collapsed_share(outcome(RISES_AND_FALLS, RISES)) == 0.5


def test_what_is_retained_is_a_share_of_each_seeds_own_score_on_policy() -> None:
    table = Table.of([outcome(RISES, RISES), outcome(RISES, RISES_AND_FALLS, staleness=8)])
    share = table.retained("digits", "gepo", 8, of="gepo")
    assert share is not None
    assert share.mean == pytest.approx((1 + 1 / 3) / 2)


def test_nothing_is_retained_of_runs_that_collapsed_on_policy() -> None:
    table = Table.of([outcome(RISES, RISES_AND_FALLS), outcome(RISES, RISES, staleness=8)])
    assert table.retained("digits", "gepo", 8, of="gepo") is None


def test_p_is_the_share_of_sign_patterns_as_far_from_zero() -> None:
    # |+-1 +-2 +-3| >= 6 for 2 of 8 patterns; >= 4 for 4 of 8.
    zero = np.zeros(3)
    assert comparison(np.array([1.0, 2.0, 3.0]), zero).p == pytest.approx(2 / 8)
    assert comparison(np.array([-1.0, 2.0, 3.0]), zero).p == pytest.approx(4 / 8)
    assert comparison(zero, zero).p == 1.0


def test_eight_seeds_that_all_differ_the_same_way_are_significant() -> None:
    found = comparison(np.full(8, 0.5), np.full(8, 0.4))
    assert found.p == pytest.approx(2 / 256)
    assert found.is_significant
    assert found.difference.mean == pytest.approx(0.1)


def test_rank_correlation_sees_order_only_and_shares_ranks_of_ties() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 1, 2, 2]) == pytest.approx(2 / np.sqrt(5))
    assert np.isnan(rank_correlation([1, 2, 3], [5, 5, 5]))


def test_the_rate_chosen_ends_best_over_all_tuning_staleness_and_the_lowest_wins_a_tie() -> None:
    fresh_only = [outcome(RISES, rate=1e-2), outcome(RISES_AND_FALLS, rate=1e-2, staleness=32)]
    steady = [outcome(RISES, rate=rate, staleness=s) for rate in (3e-3, 1e-3) for s in (0, 32)]
    assert chosen_rates([*fresh_only, *steady]) == {("digits", "gepo"): 1e-3}
