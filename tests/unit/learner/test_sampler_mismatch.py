"""Who is off for certain is quarantined, whatever the staleness of its groups; nobody is for the drift."""

import math
from dataclasses import replace

import pytest

from learner.config import LearnerConfig
from learner.intake.divergence_panel import HALF_LIFE_STEPS, Observed
from learner.intake.sampler_mismatch import GROSS_GROUPS, LEAST_FRESH_GROUPS, LEAST_GROUPS, LEAST_PROBES
from node.values.limits import PROBE_S
from support.fleets import Fleet, Watched, one

THRESHOLD_NATS = float(LearnerConfig.model_fields["quarantine_mismatch_nats"].default)

HEAVY_DRIFT = [(1.0, 1.0, 0.7), (1.0, 2.0, 0.7), (0.5, 0.5, 1.0)]
"""Nats a token at age 32, its power of age, unevenness of groups."""


def test_a_sampler_is_quarantined_on_several_fresh_groups() -> None:
    mismatches = Watched(threshold_nats=0.2)
    for _ in range(LEAST_FRESH_GROUPS):
        assert mismatches.quarantined.get("a") is None
        mismatches.see([one("a", 1.0), one("b", 0.001)])
    found = mismatches.quarantined.get("a")
    assert found is not None
    assert found.nats == pytest.approx(1.0, abs=0.05)
    assert mismatches.quarantined.get("b") is None


def test_a_mean_beyond_the_threshold_by_less_than_its_uncertainty_is_not_enough() -> None:
    mismatches = Watched(threshold_nats=0.2)
    for kl_nats in (0.1, 0.5, 0.3, 0.3):
        mismatches.see([one("a", kl_nats)])
    assert mismatches.panel.mismatch("a").nats > 0.2
    assert mismatches.quarantined.get("a") is None


def delivered_until_quarantined(mismatches: Watched, fleet: Fleet) -> int:
    """Return how many groups of sampler 0 came, until it is quarantined, and nobody else."""
    delivered = 0
    for batch in fleet.steps(0, 40):
        mismatches.see(batch)
        delivered += sum(group.sampler_id == "0" for group in batch)
        if mismatches.quarantined:
            break
    assert list(mismatches.quarantined) == ["0"]
    return delivered


def test_a_sampler_with_stale_groups_only_is_measured_against_others_of_that_age() -> None:
    fleet = Fleet([(16, 32), (12, 32), (8, 24)], [0.4, 0.001, 0.001], drift_nats=0.1)
    mismatches = Watched(threshold_nats=0.2)
    assert LEAST_GROUPS <= delivered_until_quarantined(mismatches, fleet) <= 96
    assert mismatches.unmeasured_samplers == 0


def test_a_sampler_whose_tokens_no_policy_drew_is_quarantined_on_a_few_stale_groups() -> None:
    fleet = Fleet([(2, 5)] * 3, [6.0, 0.001, 0.001], drift_nats=0.5)
    assert GROSS_GROUPS <= delivered_until_quarantined(Watched(threshold_nats=0.05), fleet) < LEAST_GROUPS


def test_a_sampler_that_compares_with_nobody_is_unmeasured_and_believed() -> None:
    mismatches = Watched(threshold_nats=0.2)
    for _ in range(100):
        mismatches.see([one("far", 3.0, age=16)])
    assert mismatches.unmeasured_samplers == 1
    assert mismatches.quarantined.get("far") is None
    assert mismatches.panel.mismatch("far").error_nats > 1.0


@pytest.mark.parametrize(("drift_nats", "power", "unevenness"), HEAVY_DRIFT)
def test_nobody_is_quarantined_for_the_drift_of_the_policy(
    drift_nats: float, power: float, unevenness: float
) -> None:
    for seed in (0, 2, 4):
        ages = [(8 * k % 24, 8 * k % 24 + 4 + 3 * k) for k in range(1 + 2 * seed)]
        fleet = Fleet(ages, [0.001] * len(ages), drift_nats, power, unevenness)
        mismatches = Watched(threshold_nats=THRESHOLD_NATS)
        for batch in fleet.steps(seed, 60):
            mismatches.see(batch)
        assert [name for name in map(str, range(len(ages))) if mismatches.quarantined.get(name)] == []


def test_a_quarantine_holds_when_no_group_comes_any_more() -> None:
    mismatches = Watched(threshold_nats=0.2)
    for _ in range(8):
        mismatches.see([one("a", 2.0)])
    for _ in range(10 * HALF_LIFE_STEPS):
        mismatches.see([one("b", 0.0)])
    assert mismatches.quarantined.get("a") is not None


def test_an_infinite_threshold_quarantines_nobody() -> None:
    mismatches = Watched(threshold_nats=math.inf)
    for _ in range(LEAST_GROUPS):
        mismatches.see([one("a", 1e300)])
    assert mismatches.quarantined.get("a") is None


def quarantined() -> Watched:
    mismatches = Watched(threshold_nats=0.2)
    for _ in range(LEAST_FRESH_GROUPS):
        mismatches.see([one("a", 1.0), one("b", 0.001)])
    assert list(mismatches.quarantined) == ["a"]
    return mismatches


def test_a_sampler_whose_probes_fit_is_released_and_what_it_was_before_is_forgotten() -> None:
    mismatches = quarantined()
    mismatches.takes_probe("a", now=0)
    for _ in range(20):
        mismatches.see([one("a", 1.0)])  # on its way before
    for n in range(1, LEAST_PROBES + 1):
        assert mismatches.takes_probe("a", now=n * PROBE_S)
        assert "a" in mismatches.quarantined
        mismatches.see([one("a", 0.001), one("b", 0.001)])
    assert not mismatches.quarantined
    for _ in range(20):
        mismatches.see([one("a", 0.001), one("b", 0.001)])
    assert not mismatches.quarantined


def test_a_sampler_whose_probes_do_not_fit_stays_and_moves_nobody_elses_measure() -> None:
    mismatches = quarantined()
    for n in range(100):
        mismatches.takes_probe("a", now=n * PROBE_S)
        mismatches.see([one("a", 1.0, age=8), one("b", 0.001, age=8)])
    assert list(mismatches.quarantined) == ["a"]
    assert mismatches.panel.drift(8).nats < 0.01


def test_a_sampler_quarantined_again_has_none_taken_that_was_on_its_way_either() -> None:
    mismatches = quarantined()
    for n in range(LEAST_PROBES + 1):
        mismatches.takes_probe("a", now=n * PROBE_S)
        mismatches.see([one("a", 0.001), one("b", 0.001)])
    assert not mismatches.quarantined
    assert not mismatches.takes_probe("a", now=100 * PROBE_S)  # by a verifier, or for copies


def test_a_quarantined_sampler_has_a_group_taken_every_few_minutes_and_none_that_was_on_its_way() -> None:
    mismatches = quarantined()
    assert [mismatches.takes_probe("a", now=t) for t in (0, 1, PROBE_S / 4)] == [False] * 3
    assert [mismatches.takes_probe("a", now=PROBE_S + t) for t in (0, 1)] == [True, False]
    assert mismatches.takes_probe("a", now=2 * PROBE_S)


def said(by: str, *groups: Observed) -> list[Observed]:
    return [replace(group, said_by=by) for group in groups]


def honest_but(mismatches: Watched, *, steps: int, **contributors: float) -> None:
    """Let contributors measure three samplers in turn, and say this of sampler a, the truth of the others."""
    for step in range(steps):
        groups = []
        for place, (name, nats) in enumerate(contributors.items()):
            sampler = "abc"[(step + place) % 3]
            groups += said(name, *[one(sampler, nats if sampler == "a" else 0.001, age=step // 3 % 3)] * 2)
        mismatches.see(groups)


def test_one_contributors_word_shuts_no_sampler_out_where_there_are_others() -> None:
    mismatches = Watched(threshold_nats=0.05)
    honest_but(mismatches, steps=200, liar=8.0, honest=0.001, third=0.001)
    assert not mismatches.quarantined


@pytest.mark.parametrize("others", [{"second": 8.0}, {"second": 8.0, "third": 0.001}, {}])
def test_two_contributors_do_and_so_does_the_only_one(others: dict[str, float]) -> None:
    mismatches = Watched(threshold_nats=0.05)
    honest_but(mismatches, steps=120, first=8.0, **others)
    assert set(mismatches.quarantined) == {"a"}


def test_a_contributor_that_has_long_left_is_not_waited_for() -> None:
    mismatches = Watched(threshold_nats=0.05)
    honest_but(mismatches, steps=10, gone=0.001)
    honest_but(mismatches, steps=HALF_LIFE_STEPS, here=8.0)
    assert not mismatches.quarantined
    honest_but(mismatches, steps=6, here=8.0)
    assert set(mismatches.quarantined) == {"a"}
