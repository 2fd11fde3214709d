import math

import pytest

from learner.mismatch import LEAST_GROUPS, REMEMBERED_SAMPLERS, WINDOW_GROUPS, Mismatch, MismatchBook


def test_a_sampler_is_quarantined_on_the_mean_of_several_groups() -> None:
    book = MismatchBook(threshold_nats=0.2)
    for number, nats in enumerate([0.1, 0.5, 0.3, 0.3]):
        assert not book.is_quarantined("a")
        book.observe([Mismatch("a", nats), Mismatch("b", 0.001)])
        assert book.is_quarantined("a") == (number + 1 == LEAST_GROUPS)
    assert book.mean_nats("a") == pytest.approx(0.3)
    assert not book.is_quarantined("b")


def test_the_mean_forgets_groups_of_long_ago() -> None:
    book = MismatchBook(threshold_nats=1.0)
    book.observe([Mismatch("a", 100.0)])
    book.observe([Mismatch("a", 0.0)] * 10 * WINDOW_GROUPS)
    assert book.mean_nats("a") < 0.01


def test_a_sampler_that_has_shown_nothing_fresh_is_believed() -> None:
    book = MismatchBook(threshold_nats=1e-9)
    assert not book.is_quarantined("a")
    assert book.mean_nats("a") == 0.0


def test_an_infinite_threshold_quarantines_nobody() -> None:
    book = MismatchBook(threshold_nats=math.inf)
    book.observe([Mismatch("a", 1e300)] * LEAST_GROUPS)
    assert not book.is_quarantined("a")


def test_only_so_many_samplers_are_remembered_the_recent_ones() -> None:
    book = MismatchBook(threshold_nats=0.5)
    book.observe([Mismatch("first", 1.0), Mismatch("second", 1.0)])
    book.observe([Mismatch("first", 1.0)])
    book.observe([Mismatch(str(n), 0.0) for n in range(REMEMBERED_SAMPLERS - 1)])
    assert book.mean_nats("first") == 1.0
    assert book.mean_nats("second") == 0.0
