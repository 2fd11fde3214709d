"""Who is off for certain is quarantined, whatever the staleness of its groups; nobody is for the drift."""

import math

import pytest

from learner.intake.mismatch import LEAST_FRESH_GROUPS, LEAST_GROUPS, MismatchBook
from support.fleets import Fleet, one

HEAVY_DRIFT = [(1.0, 1.0, 0.7), (1.0, 2.0, 0.7), (0.5, 0.5, 1.0)]
"""Nats a token at age 32, its power of age, unevenness of groups."""


def test_a_sampler_is_quarantined_on_several_fresh_groups() -> None:
    book = MismatchBook(threshold_nats=0.2)
    for _ in range(LEAST_FRESH_GROUPS):
        assert book.quarantine("a") is None
        book.observe([one("a", 1.0), one("b", 0.001)])
    found = book.quarantine("a")
    assert found is not None
    assert found.nats == pytest.approx(1.0, abs=0.05)
    assert book.quarantine("b") is None


def test_a_mean_beyond_the_threshold_by_less_than_its_uncertainty_is_not_enough() -> None:
    book = MismatchBook(threshold_nats=0.2)
    for kl_nats in (0.1, 0.5, 0.3, 0.3):
        book.observe([one("a", kl_nats)])
    assert book.mismatch("a").nats > 0.2
    assert book.quarantine("a") is None


def test_who_delivers_stale_groups_only_is_measured_against_others_of_that_age() -> None:
    fleet = Fleet([(16, 32), (12, 32), (8, 24)], [0.4, 0.001, 0.001], drift_nats=0.1)
    book = MismatchBook(threshold_nats=0.2)
    delivered = 0
    for batch in fleet.steps(0, 40):
        book.observe(batch)
        delivered += sum(group.sampler_id == "0" for group in batch)
        if book.quarantine("0"):
            break
    assert LEAST_GROUPS <= delivered <= 96
    assert book.quarantine("1") is None
    assert book.quarantine("2") is None
    assert book.unmeasured_samplers == 0


def test_who_can_be_compared_with_nobody_is_unmeasured_and_believed() -> None:
    book = MismatchBook(threshold_nats=0.2)
    for _ in range(100):
        book.observe([one("far", 3.0, age=16)])
    assert book.unmeasured_samplers == 1
    assert book.quarantine("far") is None
    assert book.mismatch("far").error_nats > 1.0


@pytest.mark.parametrize(("drift_nats", "power", "unevenness"), HEAVY_DRIFT)
def test_nobody_is_quarantined_for_the_drift_of_the_policy(
    drift_nats: float, power: float, unevenness: float
) -> None:
    for seed in range(5):
        ages = [(8 * k % 24, 8 * k % 24 + 4 + 3 * k) for k in range(1 + 2 * seed)]
        fleet = Fleet(ages, [0.001] * len(ages), drift_nats, power, unevenness)
        book = MismatchBook(threshold_nats=0.2)
        for batch in fleet.steps(seed, 60):
            book.observe(batch)
        assert [name for name in map(str, range(len(ages))) if book.quarantine(name)] == []


def test_a_quarantine_holds_when_no_group_comes_any_more() -> None:
    book = MismatchBook(threshold_nats=0.2)
    for _ in range(8):
        book.observe([one("a", 2.0)])
    for _ in range(2000):
        book.observe([one("b", 0.0)])
    assert book.quarantine("a") is not None


def test_a_sampler_that_has_shown_nothing_is_believed() -> None:
    assert MismatchBook(threshold_nats=1e-9).quarantine("a") is None


def test_an_infinite_threshold_quarantines_nobody() -> None:
    book = MismatchBook(threshold_nats=math.inf)
    for _ in range(LEAST_GROUPS):
        book.observe([one("a", 1e300)])
    assert book.quarantine("a") is None
