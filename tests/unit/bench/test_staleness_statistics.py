"""The numbers of the staleness report, against numbers worked by hand."""

import itertools

import numpy as np
import pytest

from bench.staleness_lab.cells import Cell, Floats, Outcome, Setting
from bench.staleness_lab.statistics import best_scores, collapsed_share, simultaneous

RISES_AND_FALLS = (0.0, 0.9, 0.9, 0.9, 0.3, 0.3, 0.3)
RISES = (0.0, 0.2, 0.4, 0.6, 0.9, 0.9, 0.9)


def outcome(*scores: tuple[float, ...]) -> Outcome:
    """An outcome of which only the scores matter."""
    seeds = tuple(range(len(scores)))
    cell = Cell("digits", "gepo", Setting(), "", "fixed", 0, "none", 1e-3, seeds, versions=60)
    return Outcome(cell=cell, scores=scores, skipped=0.0, seconds=0.0)


def test_best_and_end_are_means_of_three_evaluations() -> None:
    assert best_scores((RISES_AND_FALLS, RISES)) == pytest.approx([0.9, 0.9])
    assert outcome(RISES_AND_FALLS, RISES).ends == pytest.approx([0.3, 0.9])


def test_a_run_that_ends_far_below_its_best_has_collapsed() -> None:
    assert collapsed_share(outcome(RISES_AND_FALLS, RISES)) == 0.5


def test_alone_p_is_the_share_of_sign_patterns_as_far_from_zero() -> None:
    # |+-1 +-2 +-3| >= 6 for 2 of 8 patterns; >= 4 for 4 of 8; t grows with the mean at equal squares.
    for differences, p in (((1.0, 2.0, 3.0), 2 / 8), ((-1.0, 2.0, 3.0), 4 / 8), ((0.0, 0.0, 0.0), 1.0)):
        assert simultaneous(np.array([differences]))[0].p == pytest.approx(p)


def test_in_a_family_every_pair_is_held_against_the_largest_t_of_all() -> None:
    rng = np.random.default_rng(0)
    differences = rng.normal(0.3, 1.0, size=(5, 6))

    def t(values: Floats) -> Floats:
        of_pairs: Floats = np.abs(values.mean(axis=1)) / (values.std(axis=1, ddof=1) / np.sqrt(6))
        return of_pairs

    null = [t(differences * np.array(signs)).max() for signs in itertools.product((-1, 1), repeat=6)]
    by_hand = [float(np.mean(null >= each - 1e-9)) for each in t(differences)]
    found = simultaneous(differences)
    assert [interval.p for interval in found] == pytest.approx(by_hand)
    critical = np.quantile(null, 0.95)
    error = differences.std(axis=1, ddof=1) / np.sqrt(6)
    assert [interval.high for interval in found] == pytest.approx(differences.mean(axis=1) + critical * error)


def test_company_widens_an_interval() -> None:
    rng = np.random.default_rng(1)
    many = rng.normal(0.0, 1.0, size=(40, 10))
    alone, together = simultaneous(many[:1])[0], simultaneous(many)[0]
    assert alone.mean == together.mean
    assert together.high - together.low > 1.3 * (alone.high - alone.low)


def test_of_families_without_a_difference_about_one_in_twenty_shows_one() -> None:
    rng = np.random.default_rng(2)
    families = rng.normal(0.0, 1.0, size=(60, 30, 10))
    false = [any(i.verdict != "tied" for i in simultaneous(family)) for family in families]
    assert 0.01 < np.mean(false) < 0.11


def test_ten_seeds_that_all_differ_the_same_way_are_better_or_worse() -> None:
    steady = np.full((1, 10), 0.1) + np.linspace(0, 0.01, 10)
    up, down = simultaneous(np.concatenate([steady, -steady]))
    assert (up.verdict, down.verdict) == ("better", "worse")
    assert up.p == pytest.approx(2 / 1024)
    assert simultaneous(np.zeros((2, 10)))[1].verdict == "tied"
    assert simultaneous(np.zeros((0, 10))) == []
