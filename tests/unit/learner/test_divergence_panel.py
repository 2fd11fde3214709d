"""Drift and mismatch of made up fleets, of which the truth is known."""

import pytest

from learner.intake.divergence_panel import (
    KNOTS,
    REMEMBERED_SAMPLERS,
    DivergencePanel,
    mean_basis,
)
from support.fleets import Fleet, one


def test_an_age_between_two_knots_has_a_share_of_both() -> None:
    assert {KNOTS[k]: s for k, s in enumerate(mean_basis(((20, 1.0),))) if s} == {16: 0.5, 24: 0.5}
    assert {KNOTS[k]: s for k, s in enumerate(mean_basis(((0, 0.25), (3, 0.75)))) if s} == {0: 0.25, 3: 0.75}
    assert {KNOTS[k]: s for k, s in enumerate(mean_basis(((999, 1.0),))) if s} == {256: 1.0}
    assert {KNOTS[k]: s for k, s in enumerate(mean_basis(((-1, 1.0),))) if s} == {0: 1.0}


@pytest.mark.parametrize("seed", range(3))
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


def test_only_so_many_samplers_are_remembered_the_recent_ones() -> None:
    panel = DivergencePanel()
    panel.observe([one("first", 1.0), one("second", 1.0)])
    panel.observe([one("first", 1.0)])
    panel.observe([one(str(number), 0.0) for number in range(REMEMBERED_SAMPLERS - 1)])
    assert panel.groups("first") > 0
    assert panel.groups("second") == 0
