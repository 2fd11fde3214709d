"""Drift and mismatch of made up fleets, of which the truth is known."""

import math

import pytest

from learner.intake.divergence_panel import (
    HALF_LIFE_STEPS,
    KNOTS,
    REMEMBERED_SAMPLERS,
    UNKNOWN_NATS,
    DivergencePanel,
    Observed,
    mean_basis,
)
from support.fleets import Fleet, one


def test_an_age_between_two_knots_has_a_share_of_both() -> None:
    assert {KNOTS[k]: s for k, s in enumerate(mean_basis(((20, 1.0),))) if s} == {16: 0.5, 24: 0.5}
    assert {KNOTS[k]: s for k, s in enumerate(mean_basis(((0, 0.25), (3, 0.75)))) if s} == {0: 0.25, 3: 0.75}
    assert {KNOTS[k]: s for k, s in enumerate(mean_basis(((999, 1.0),))) if s} == {256: 1.0}
    assert {KNOTS[k]: s for k, s in enumerate(mean_basis(((-1, 1.0),))) if s} == {0: 1.0}


def test_at_age_0_a_mismatch_is_the_mean_divergence() -> None:
    panel = DivergencePanel()
    for kl_nats in (0.1, 0.5, 0.3, 0.3):
        panel.observe([one("a", kl_nats)])
    assert panel.mismatch("a").nats == pytest.approx(0.3, abs=1e-3)
    assert panel.fresh_groups("a") == pytest.approx(4.0, rel=0.02)


def test_a_sampler_alone_at_its_age_is_not_measured() -> None:
    panel = DivergencePanel()
    for _ in range(100):
        panel.observe([one("near", 0.001), one("far", 0.4, age=20)])
    assert panel.mismatch("far").error_nats > 1.0
    assert panel.mismatch("near").error_nats < 0.01
    assert panel.mismatch("nobody").error_nats == UNKNOWN_NATS


def test_a_few_groups_of_age_0_tell_a_samplers_mismatch_from_the_drift_of_the_others() -> None:
    panel = DivergencePanel()
    for step in range(100):
        panel.observe([one("far", 0.4, age=20), *([one("far", 0.05)] if step % 10 == 0 else [])])
    estimate = panel.mismatch("far")
    assert estimate.nats == pytest.approx(0.05, abs=0.01)
    assert estimate.error_nats < 0.1


def test_tokens_of_several_versions_count_at_their_own_ages() -> None:
    panel = DivergencePanel()
    for _ in range(40):
        panel.observe([one("whole", 0.32, age=32), one("whole", 0.0)])
        panel.observe([Observed("swapped", 0.16, ((0, 0.5), (32, 0.5)))])
    assert abs(panel.mismatch("swapped").nats) < 0.01


@pytest.mark.parametrize("seed", range(10))
def test_a_sampler_that_is_a_little_off_is_found_within_64_of_its_groups(seed: int) -> None:
    fleet = Fleet([(4, 32), (0, 24), (8, 40), (2, 32)], [0.05, 0.001, 0.001, 0.001], drift_nats=0.05)
    panel = DivergencePanel()
    delivered = 0
    for batch in fleet.steps(seed, 40):
        delivered += sum(group.sampler_id == "0" for group in batch)
        if delivered > 64:
            break
        panel.observe(batch)
    estimate = panel.mismatch("0")
    assert estimate.nats - 3 * estimate.error_nats > 0
    assert estimate.nats == pytest.approx(0.05, abs=4 * estimate.error_nats)
    for honest in "123":
        assert panel.mismatch(honest).nats - 3 * panel.mismatch(honest).error_nats < 0.01


def test_the_curve_is_the_drift_of_the_fleet() -> None:
    fleet = Fleet([(0, 32)] * 4, [0.0] * 4, drift_nats=0.2, power=2.0, swing=0.0)
    panel = DivergencePanel()
    for batch in fleet.steps(0, 200):
        panel.observe(batch)
    for age in (4, 8, 16, 32):
        assert panel.drift(age).nats == pytest.approx(fleet.drift(age), rel=0.1)
    assert panel.drift(0).nats == panel.drift(0).error_nats == 0.0


def test_old_groups_are_forgotten() -> None:
    panel = DivergencePanel()
    panel.observe([one("a", 5.0)] * 8)
    for _ in range(3 * HALF_LIFE_STEPS):
        panel.observe([one("a", 0.0)])
    assert panel.mismatch("a").nats < 0.05
    for _ in range(2 * HALF_LIFE_STEPS):
        panel.observe([])
    assert panel.groups("a") < 64


def test_one_group_beyond_measure_moves_little_and_infinity_is_a_number() -> None:
    panel = DivergencePanel()
    for _ in range(32):
        panel.observe([one("a", 0.001)])
    panel.observe([one("a", math.inf)])
    assert panel.mismatch("a").nats < 0.05


def test_only_so_many_samplers_are_remembered_the_recent_ones() -> None:
    panel = DivergencePanel()
    panel.observe([one("first", 1.0), one("second", 1.0)])
    panel.observe([one("first", 1.0)])
    panel.observe([one(str(number), 0.0) for number in range(REMEMBERED_SAMPLERS - 1)])
    assert panel.groups("first") > 0
    assert panel.groups("second") == 0
