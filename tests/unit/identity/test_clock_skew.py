"""Whose clock is wrong: each cell of the table in ``node.identity.clock_skew``."""

import pytest

from node.identity.clock_skew import (
    Wait,
    Window,
    hub_not_valid,
    moment,
    refused_as_expired,
    refused_at_handshake,
)

DAY_S = 86400.0
OWN = Window(100 * DAY_S, 465 * DAY_S)
EARLY_S, GOOD_S, LATE_S = 99 * DAY_S, 200 * DAY_S, 465 * DAY_S


@pytest.mark.parametrize(
    ("now", "waits_for"),
    [
        (EARLY_S, Wait.OWN_CLOCK),
        (OWN.not_before_s, Wait.HUB_CLOCK),
        (GOOD_S, Wait.HUB_CLOCK),
        (LATE_S - 1, Wait.HUB_CLOCK),
        (LATE_S, None),
    ],
)
def test_a_hub_that_says_expired_is_believed_only_where_this_clock_agrees(
    now: float, waits_for: Wait | None
) -> None:
    finding = refused_as_expired(OWN, node_id="s1", role="sampler", now=now, hub_now=600 * DAY_S)
    assert finding.waits_for is waits_for
    assert f"the coordinator's clock says {moment(600 * DAY_S)}" in finding.what
    assert f"this machine's clock says {moment(now)}" in finding.what
    assert ("heterorl-node token DIR --role sampler" in finding.fix) == (waits_for is None)


def test_a_hub_that_does_not_say_its_time_is_judged_without_it() -> None:
    finding = refused_as_expired(OWN, node_id="s1", role="sampler", now=GOOD_S, hub_now=None)
    assert finding.waits_for is Wait.HUB_CLOCK
    assert finding.what.startswith("this machine's clock says 1970-07-20")


@pytest.mark.parametrize(
    ("now", "waits_for"),
    [
        (EARLY_S, Wait.OWN_CLOCK),
        (OWN.not_before_s, Wait.HUB_CLOCK),
        (GOOD_S, Wait.HUB_CLOCK),
        (LATE_S, None),
    ],
)
def test_a_hub_that_closes_the_handshake_is_judged_by_the_dates_that_are_left(
    now: float, waits_for: Wait | None
) -> None:
    finding = refused_at_handshake(OWN, node_id="s1", role="sampler", now=now)
    assert finding.waits_for is waits_for
    assert f"valid from {moment(OWN.not_before_s)} to {moment(OWN.not_after_s)}" in finding.what


@pytest.mark.parametrize(
    ("now", "says"),
    [(EARLY_S, "if it is behind"), (OWN.not_before_s, None), (GOOD_S, None), (LATE_S, "if it is ahead")],
)
def test_a_hub_whose_certificate_is_not_valid_here_points_at_this_clock(now: float, says: str | None) -> None:
    finding = hub_not_valid(OWN, now=now)
    assert (finding is None) == (says is None)
    if finding is not None and says is not None:
        assert finding.waits_for is Wait.OWN_CLOCK
        assert says in finding.fix


def test_a_clock_beyond_the_calendar_is_written_as_it_is() -> None:
    assert moment(1e18) == "1e+18 s"
