"""Clock offsets and lag by stage, worked by hand."""

from typing import Any

import pytest

from node.telemetry.lag import (
    AHEAD_S,
    LONGEST_LAG_S,
    ClockSample,
    believed_lag_s,
    best_sample,
    clock_sample,
    submission_lags,
)
from support.groups import make_group

NOW_S = 1_800_000_000.0


def test_the_offset_is_exact_where_both_ways_take_equally_long() -> None:
    # Their clock is 100 s ahead; 2 s out, 1 s of work, 2 s back.
    sample = clock_sample(sent_at_s=10, received_at_s=112, replied_at_s=113, returned_at_s=15)
    assert sample == ClockSample(offset_s=100, round_trip_s=4)


@pytest.mark.parametrize(("out_s", "back_s"), [(0, 4), (1, 3), (4, 0)])
def test_the_offset_is_wrong_by_at_most_half_the_round_trip(out_s: float, back_s: float) -> None:
    sample = clock_sample(
        sent_at_s=0, received_at_s=out_s - 7, replied_at_s=out_s - 7, returned_at_s=out_s + back_s
    )
    assert abs(sample.offset_s - -7) <= sample.round_trip_s / 2 == 2


def test_the_best_sample_is_the_fastest_that_is_possible() -> None:
    samples = [ClockSample(1, 0.5), ClockSample(2, 0.1), ClockSample(3, -0.2)]
    assert best_sample(samples) == ClockSample(2, 0.1)
    assert best_sample(samples[2:]) is None


def test_each_stage_is_the_time_between_two_stamps() -> None:
    group = make_group(sampling_started_at_s=10.0, sampling_finished_at_s=14.0, graded_at_s=15.0)
    assert submission_lags(group, spooled_at_s=18.0) == {"sampled": 4.0, "graded": 1.0, "uploaded": 3.0}


def test_a_stage_that_seems_to_end_before_it_began_took_no_time() -> None:
    assert submission_lags(make_group(graded_at_s=3.0), spooled_at_s=2.5)["uploaded"] == 0.0


@pytest.mark.parametrize(
    "stamps",
    [
        {"graded_at_s": 1e300},
        {"sampling_started_at_s": -1e300},
        {"sampling_started_at_s": NOW_S - LONGEST_LAG_S - 1},
        {"graded_at_s": NOW_S + AHEAD_S + 1},
    ],
)
def test_a_timestamp_that_cannot_be_right_has_no_lag_rather_than_one_that_no_histogram_forgets(
    stamps: dict[str, Any],
) -> None:
    right: dict[str, Any] = {
        "sampling_started_at_s": NOW_S,
        "sampling_finished_at_s": NOW_S,
        "graded_at_s": NOW_S,
    }
    assert submission_lags(make_group(**right), spooled_at_s=NOW_S) != {}
    assert submission_lags(make_group(**(right | stamps)), spooled_at_s=NOW_S) == {}
    assert believed_lag_s(float("nan"), now=NOW_S) is None
    assert believed_lag_s(NOW_S + 1, now=NOW_S) == 0.0
