"""Who is off for certain is quarantined, whatever the staleness of its groups; nobody is for the drift."""

import math

import pytest

from learner.intake.sampler_mismatch import LEAST_FRESH_GROUPS, LEAST_GROUPS, SamplerMismatches
from support.fleets import Fleet, one

HEAVY_DRIFT = [(1.0, 1.0, 0.7), (1.0, 2.0, 0.7), (0.5, 0.5, 1.0)]
"""Nats a token at age 32, its power of age, unevenness of groups."""


def test_a_sampler_is_quarantined_on_several_fresh_groups() -> None:
    mismatches = SamplerMismatches(threshold_nats=0.2)
    for _ in range(LEAST_FRESH_GROUPS):
        assert mismatches.quarantine("a") is None
        mismatches.observe([one("a", 1.0), one("b", 0.001)])
    found = mismatches.quarantine("a")
    assert found is not None
    assert found.nats == pytest.approx(1.0, abs=0.05)
    assert mismatches.quarantine("b") is None


def test_a_mean_beyond_the_threshold_by_less_than_its_uncertainty_is_not_enough() -> None:
    mismatches = SamplerMismatches(threshold_nats=0.2)
    for kl_nats in (0.1, 0.5, 0.3, 0.3):
        mismatches.observe([one("a", kl_nats)])
    assert mismatches.panel.mismatch("a").nats > 0.2
    assert mismatches.quarantine("a") is None


def test_who_delivers_stale_groups_only_is_measured_against_others_of_that_age() -> None:
    fleet = Fleet([(16, 32), (12, 32), (8, 24)], [0.4, 0.001, 0.001], drift_nats=0.1)
    mismatches = SamplerMismatches(threshold_nats=0.2)
    delivered = 0
    for batch in fleet.steps(0, 40):
        mismatches.observe(batch)
        delivered += sum(group.sampler_id == "0" for group in batch)
        if mismatches.quarantine("0"):
            break
    assert LEAST_GROUPS <= delivered <= 96
    assert mismatches.quarantine("1") is None
    assert mismatches.quarantine("2") is None
    assert mismatches.unmeasured_samplers == 0


def test_who_can_be_compared_with_nobody_is_unmeasured_and_believed() -> None:
    mismatches = SamplerMismatches(threshold_nats=0.2)
    for _ in range(100):
        mismatches.observe([one("far", 3.0, age=16)])
    assert mismatches.unmeasured_samplers == 1
    assert mismatches.quarantine("far") is None
    assert mismatches.panel.mismatch("far").error_nats > 1.0


@pytest.mark.parametrize(("drift_nats", "power", "unevenness"), HEAVY_DRIFT)
def test_nobody_is_quarantined_for_the_drift_of_the_policy(
    drift_nats: float, power: float, unevenness: float
) -> None:
    for seed in range(5):
        ages = [(8 * k % 24, 8 * k % 24 + 4 + 3 * k) for k in range(1 + 2 * seed)]
        fleet = Fleet(ages, [0.001] * len(ages), drift_nats, power, unevenness)
        mismatches = SamplerMismatches(threshold_nats=0.2)
        for batch in fleet.steps(seed, 60):
            mismatches.observe(batch)
        assert [name for name in map(str, range(len(ages))) if mismatches.quarantine(name)] == []


def test_a_quarantine_holds_when_no_group_comes_any_more() -> None:
    mismatches = SamplerMismatches(threshold_nats=0.2)
    for _ in range(8):
        mismatches.observe([one("a", 2.0)])
    for _ in range(2000):
        mismatches.observe([one("b", 0.0)])
    assert mismatches.quarantine("a") is not None


def test_a_sampler_that_has_shown_nothing_is_believed() -> None:
    assert SamplerMismatches(threshold_nats=1e-9).quarantine("a") is None


def test_an_infinite_threshold_quarantines_nobody() -> None:
    mismatches = SamplerMismatches(threshold_nats=math.inf)
    for _ in range(LEAST_GROUPS):
        mismatches.observe([one("a", 1e300)])
    assert mismatches.quarantine("a") is None
