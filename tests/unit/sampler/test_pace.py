"""How fast a counter grows."""

from sampler.metrics import PACE_WINDOW_S, Pace
from support.clock import ManualClock


def test_the_pace_is_that_of_the_last_minute() -> None:
    clock, total = ManualClock(), 0.0
    pace = Pace(lambda: total, monotonic=clock.monotonic)
    assert pace.per_s() == 0.0
    for _ in range(10):
        clock.advance(PACE_WINDOW_S / 10)
        total += 30.0
        pace.per_s()
    assert pace.per_s() == 300.0 / PACE_WINDOW_S
    clock.advance(PACE_WINDOW_S)
    assert pace.per_s() == 0.0
