"""How old groups are."""

import numpy as np
import pytest

from bench.staleness_lab.delays import DELAYS, lags


@pytest.mark.parametrize("delay", DELAYS)
def test_no_group_is_older_than_the_run_or_the_staleness(delay: str) -> None:
    for staleness in (0, 8, 256):
        drawn = lags(delay, staleness=staleness, versions=300, groups=8)
        assert drawn.shape == (300, 8)
        assert (drawn <= np.minimum(staleness, np.arange(300))[:, None]).all()
        assert drawn.min() == 0


def test_a_fixed_delay_is_the_staleness_itself_once_the_run_is_old_enough() -> None:
    drawn = lags("fixed", staleness=32, versions=100, groups=2)
    assert drawn[:33, 0].tolist() == list(range(33))
    assert (drawn[32:] == 32).all()


def test_of_two_humps_every_other_group_is_fresh_and_the_rest_as_old_as_can_be() -> None:
    drawn = lags("humps", staleness=32, versions=100, groups=4)
    assert (drawn[:, [0, 2]] == 0).all()
    assert drawn[:, 1].tolist() == drawn[:, 3].tolist() == [min(v, 32) for v in range(100)]
