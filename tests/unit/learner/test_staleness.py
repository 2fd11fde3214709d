import math

import pytest

from learner.objective.staleness import version_discount


@pytest.mark.parametrize(
    ("staleness", "half_life", "expected"),
    [(0, 4.0, 1.0), (4, 4.0, 0.5), (8, 4.0, 0.25), (2, 4.0, math.sqrt(0.5)), (64, math.inf, 1.0)],
)
def test_the_discount_halves_every_half_life(staleness: int, half_life: float, expected: float) -> None:
    assert math.isclose(version_discount(staleness, half_life_versions=half_life), expected, rel_tol=1e-12)


@pytest.mark.parametrize(("staleness", "half_life"), [(-1, 4.0), (1, 0.0), (1, -2.0), (1, math.nan)])
def test_impossible_ages_are_refused(staleness: int, half_life: float) -> None:
    with pytest.raises(ValueError, match="versions"):
        version_discount(staleness, half_life_versions=half_life)
