"""How old groups are, by delay model."""

import numpy as np
import pytest

from bench.staleness_lab.delays import DELAYS, lags

VERSIONS, GROUPS = 2000, 8


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("staleness", [0, 8, 256])
def test_no_group_is_older_than_the_run_or_the_staleness(delay: str, staleness: int) -> None:
    drawn = lags(delay, staleness=staleness, versions=VERSIONS, groups=GROUPS, seed=1)
    assert drawn.shape == (VERSIONS, GROUPS)
    assert drawn.min() >= 0
    assert (drawn <= np.minimum(staleness, np.arange(VERSIONS))[:, None]).all()


def test_a_fixed_delay_is_the_staleness_itself_once_the_run_is_old_enough() -> None:
    drawn = lags("fixed", staleness=32, versions=100, groups=2, seed=0)
    assert drawn[:33, 0].tolist() == list(range(33))
    assert (drawn[32:] == 32).all()


def test_of_two_humps_every_other_group_is_fresh_and_the_rest_as_old_as_can_be() -> None:
    drawn = lags("humps", staleness=32, versions=100, groups=4, seed=0)
    assert (drawn[:, [0, 2]] == 0).all()
    assert drawn[:, 1].tolist() == drawn[:, 3].tolist() == [min(v, 32) for v in range(100)]


@pytest.mark.parametrize(("delay", "mean"), [("uniform", 0.5), ("lognormal", 0.213), ("weibull", 0.399)])
def test_the_mean_lag_is_the_models_mean_over_1920_s(delay: str, mean: float) -> None:
    # lognormal: exp(5.82721 + 0.61733^2 / 2) = 410.6 s, a little less when clipped; Weibull: 766 s.
    drawn = lags(delay, staleness=256, versions=20_000, groups=GROUPS, seed=2)[256:]
    assert drawn.mean() / 256 == pytest.approx(mean, abs=0.003)


def test_lags_are_a_matter_of_the_seed() -> None:
    one, same, other = (lags("uniform", staleness=64, versions=500, groups=4, seed=s) for s in (3, 3, 4))
    assert (one == same).all()
    assert (one != other).any()
