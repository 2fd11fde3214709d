"""The staleness bound that the measured drift recommends: numbers worked by hand, and made up fleets."""

import math
from bisect import bisect_left
from itertools import pairwise

import numpy as np
import pytest
import torch

from learner.intake.divergence_panel import KNOTS, DivergencePanel, Estimate
from learner.intake.recommended_staleness import LEAST_GROUPS, recommended_staleness
from learner.objective.formulas.divergence import effective_sample_size_ratio
from learner.objective.formulas.trust_regions import has_moved, largest_move
from learner.objective.menu import weighed_sample
from learner.objective.registry import load_objective
from learner.objective.sample_size import WeighedSample, token_share, truncated, within_reach
from support.fleets import Fleet, one
from support.objective_batches import gradient_of, whole_rows

DEFAULT = weighed_sample("drift_aware", {})
WHOLE_COMPLETIONS = weighed_sample("topr", {})

MEASURED = {0: Estimate(0.0, 0.0), 4: Estimate(0.010, 0.001), 8: Estimate(0.018, 0.001)}
"""Upper ends: 0.012 at age 4, 0.020 at 8."""


def share(sample: WeighedSample, nats: float, *, tokens: float) -> float:
    assert sample.share is not None
    return sample.share(nats, tokens)


def versions(drift: dict[int, Estimate], sample: WeighedSample = DEFAULT, *, tokens: float) -> int:
    recommended = recommended_staleness(drift, sample=sample, tokens=tokens)
    assert recommended.versions is not None
    assert not recommended.unknown_because
    return recommended.versions


def test_shares_of_token_weights_by_hand() -> None:
    """d = 1/2, s = 1: P(-1/2) = .308538, P(-3/2) = .066807."""
    assert token_share(0.0, truncated(1.0)) == pytest.approx(1.0)
    # (2 * .308538)^2 / (.308538 + e * .066807)
    assert token_share(0.5, truncated(1.0)) == pytest.approx(0.380782 / 0.490138, abs=1e-5)
    # Whole p/q: e^(-2d).
    assert token_share(0.5, truncated(math.inf)) == pytest.approx(math.exp(-1), rel=1e-6)
    # p/q of good tokens up to 1: P(-1/2), e P(-3/2); of all bad ones: 1, e.
    half = token_share(0.5, lambda ratio: np.where(ratio <= 1, ratio, 0.0), truncated(math.inf))
    expected = ((0.308538 + 1) / 2) ** 2 / (math.e * (0.066807 + 1) / 2)
    assert half == pytest.approx(expected, abs=1e-3)
    assert token_share(0.5, lambda ratio: 0.0 * ratio) == 0.0


@pytest.mark.parametrize(
    ("objective", "options"),
    [("grpo", {"dual_clip": 3.0}), ("cispo", {}), ("tis", {}), ("decoupled_ppo", {"behaviour_cap": 5.0})],
)
@pytest.mark.parametrize("nats", [0.01, 0.3, 1.6])
def test_the_share_is_that_of_the_objectives_own_weights(
    objective: str, options: dict[str, float], nats: float
) -> None:
    """As its gradients have them: how hard a token of advantage +-1 pulls."""
    rows = 100_000
    generator = torch.Generator().manual_seed(3)
    log_ratio = math.sqrt(2 * nats) * torch.randn(rows, 1, generator=generator, dtype=torch.float64) - nats
    reward = torch.tensor([0.0, 1.0]).repeat(rows // 2)
    batch = whole_rows(log_ratio, torch.zeros_like(log_ratio), reward, group=torch.arange(rows) // 2)
    gradient = gradient_of(load_objective(objective, options)(batch).loss, batch)
    measured = effective_sample_size_ratio(gradient[:, 0].abs())
    sample = weighed_sample(objective, options)
    assert share(sample, nats, tokens=7) == pytest.approx(measured, rel=0.05)
    assert sample.name == "token weights"


def test_a_bound_is_not_known_of_weights_whose_spread_is_not_measured() -> None:
    for objective in ("gepo", "gspo", "dppo_tv", "dg", "reinforce", "my_package.my_module:mine"):
        recommended = recommended_staleness(MEASURED, sample=weighed_sample(objective, {}), tokens=100)
        assert recommended.versions is None
        assert objective in recommended.unknown_because


def test_shares_within_reach_of_the_trust_region_by_hand() -> None:
    assert within_reach(0.0, 0.5) == 1.0
    # d = 1/50, s = h = 1/5: 1 - (P(-1.1) + P(-.9)) / 2
    assert within_reach(0.02, 0.5) == pytest.approx(1 - (0.135666 + 0.184060) / 2, abs=1e-6)
    # d = 1/2, s = 1, h at its end of 1/2: 1 - (P(-1) + P(0)) / 2
    assert within_reach(0.5, 0.5) == pytest.approx(1 - (0.158655 + 0.5) / 2, abs=1e-6)


def test_the_share_within_reach_is_that_of_the_default_objectives_completions() -> None:
    """Completions of two tokens that move together, by 0.03 of a nat a version."""
    for age in (4, 64, 900):
        nats = 0.03**2 * age / 2
        draws = torch.randn(200_000, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        log_ratio = (math.sqrt(2 * nats) * draws - nats).expand(-1, 2)
        limit = largest_move(torch.full((200_000,), age), per_root_version=0.03, most_nats=0.5)
        advantage = torch.tensor([1.0, -1.0]).repeat(100_000)
        moved = has_moved(log_ratio, torch.ones(200_000, 2, dtype=torch.bool), advantage, limit=limit)
        kept = 1 - float(moved.double().mean())
        assert within_reach(nats, 0.5) == pytest.approx(kept, abs=0.005)


def test_the_share_of_whole_completions_falls_with_every_token_that_of_the_default_does_not() -> None:
    assert share(WHOLE_COMPLETIONS, 0.001, tokens=100) == pytest.approx(math.exp(-0.2))
    assert share(WHOLE_COMPLETIONS, math.log(2) / 2 / 100, tokens=100) == pytest.approx(0.5)
    in_full = within_reach(0.1, 0.5) * token_share(0.1, truncated(1.0))
    for tokens in (1, 10_000):
        assert share(DEFAULT, 0.1, tokens=tokens) == pytest.approx(in_full)
    assert share(DEFAULT, -0.1, tokens=1) == pytest.approx(1.0)
    assert 0 < share(DEFAULT, 1e9, tokens=1e6) < 0.05


@pytest.mark.parametrize("tokens", [1, 8, 512])
def test_the_further_the_policies_are_apart_the_less_is_left(tokens: float) -> None:
    for sample in (DEFAULT, WHOLE_COMPLETIONS):
        shares = [share(sample, 10 ** (exponent / 20), tokens=tokens) for exponent in range(-120, 21)]
        assert all(further <= nearer + 1e-12 for nearer, further in pairwise(shares))


def test_a_bound_beyond_what_is_measured_by_hand() -> None:
    """The default is at a half at 0.55716 nats a token: 8 sqrt(0.55716 / 0.020) = 42.22."""
    assert share(DEFAULT, 0.55716, tokens=100) == pytest.approx(0.5, abs=1e-5)
    assert versions(MEASURED, tokens=100) == 42
    recommended = recommended_staleness(MEASURED, sample=DEFAULT, tokens=100)
    assert recommended.sample == "token weights"


def test_a_bound_between_measured_ages_by_hand() -> None:
    """Whole completions of T tokens halve at ln 2 / 2T; a line leads through 0, 0.012 at 4 and 0.020 at 8."""
    assert versions(MEASURED, WHOLE_COMPLETIONS, tokens=100) == 1  # 0.003466: 1.16
    assert versions(MEASURED, WHOLE_COMPLETIONS, tokens=20) == 6  # 0.017329: 4 + 4 * 0.005329 / 0.008 = 6.66
    assert versions(MEASURED, WHOLE_COMPLETIONS, tokens=1000) == 0
    without_fresh = {age: MEASURED[age] for age in (4, 8)}
    assert versions(without_fresh, WHOLE_COMPLETIONS, tokens=100) == 1


def test_no_bound_is_recommended_beyond_the_oldest_age_that_can_be_measured() -> None:
    still = {age: Estimate(0.0, 1e-6) for age in (0, 128)}
    assert versions(still, tokens=100) == KNOTS[-1] == 256


def test_the_less_is_known_the_lower_is_the_bound() -> None:
    bounds = [
        versions({0: Estimate(0.0, 0.0), 8: Estimate(0.018, error)}, tokens=100)
        for error in (0.0, 0.001, 0.01, 0.1, 1.0, 10.0)
    ]
    assert bounds == sorted(bounds, reverse=True)
    assert len(set(bounds)) == len(bounds)


def test_an_age_of_few_groups_cannot_have_drifted_more_than_an_older_one() -> None:
    """Half is left up to 0.019254 nats: with 0.020 at age 6 too, 4 + 2 * 0.007254 / 0.008 = 5.81."""
    rare = {**MEASURED, 6: Estimate(0.3, 0.2)}
    assert versions(rare, WHOLE_COMPLETIONS, tokens=18) == 5


def test_a_drift_below_0_counts_as_0() -> None:
    """Upper ends 0.002 at age 2, 0.012 at 4; half is left up to 0.003466: 2 + 2 * 0.001466 / 0.010 = 2.29."""
    below = {**MEASURED, 2: Estimate(-0.5, 0.001)}
    assert versions(below, WHOLE_COMPLETIONS, tokens=100) == 2


def test_nothing_measured_and_one_age_are_said_and_no_number_is() -> None:
    panel = DivergencePanel()
    for age, because in ((None, "has not trained on 8 groups of one age"), (8, "were about 8 versions old")):
        if age is not None:
            panel.observe([one("a", 0.1, age=age)] * LEAST_GROUPS)
        drift = panel.drift_by_age(least_groups=LEAST_GROUPS)
        recommended = recommended_staleness(drift, sample=DEFAULT, tokens=100)
        assert recommended.versions is None
        assert because in recommended.unknown_because
    panel.observe([one("a", 0.001)] * LEAST_GROUPS)
    assert sorted(panel.drift_by_age(least_groups=LEAST_GROUPS)) == [0, 8]


def true_bound(fleet: Fleet, sample: WeighedSample, *, tokens: float) -> int:
    """Return the oldest age at which half is left; what is left falls with age."""

    def is_gone(age: int) -> bool:
        return share(sample, fleet.drift(age), tokens=tokens) < 0.5

    return bisect_left(range(2000), True, key=is_gone) - 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_bound_of_a_made_up_fleet_is_never_above_the_truth_and_not_far_below(
    power: float, seed: int
) -> None:
    """Drift grows with age, or up to its square; groups are uneven and at most 24 versions old."""
    fleet = Fleet([(0, 8), (4, 24)], [0.0, 0.0], drift_nats=0.05, power=power, swing=0.0)
    panel = DivergencePanel()
    for batch in fleet.steps(seed, 60):
        panel.observe(batch)
    drift = panel.drift_by_age(least_groups=LEAST_GROUPS)
    for sample, tokens in ((WHOLE_COMPLETIONS, 16), (DEFAULT, 500)):
        truth = true_bound(fleet, sample, tokens=tokens)
        assert min(truth, 256) / 4 <= versions(drift, sample, tokens=tokens) <= truth
