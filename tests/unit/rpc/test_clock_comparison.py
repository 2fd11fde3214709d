"""Whose clock is wrong: each cell of the table in ``node.rpc.clock_comparison``."""

import dataclasses
import time
from pathlib import Path

import pytest

from node.errors import Reason, RefusedError
from node.identity.identity_store import Identity
from node.rpc.call_ends import ConnectionLost, TlsFailure
from node.rpc.clock_comparison import AwaitedClock, ClockFinding, compare_clocks
from node.system.clock import moment
from support.identity import make_run
from support.present import present

DAY_S = 86400.0
START_S, END_S = 100 * DAY_S, 465 * DAY_S
EARLY_S, GOOD_S = 99 * DAY_S, 200 * DAY_S


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    directory: Path = tmp_path_factory.mktemp("run")
    sampler = make_run(directory, now=time.time()).sampler
    return dataclasses.replace(sampler, not_before_s=START_S, not_after_s=END_S)


def expired(hub_now_s: float | None) -> RefusedError:
    return RefusedError(Reason.EXPIRED, "expired", is_remote=True, hub_now_s=hub_now_s)


def closed(tls: TlsFailure | None = TlsFailure.CLOSED) -> ConnectionLost:
    lost = ConnectionLost("UNAVAILABLE: Socket closed")
    lost.tls = tls
    return lost


def found(error: RefusedError | ConnectionLost, own: Identity, now: float) -> ClockFinding:
    finding = present(compare_clocks(error, own, now=now))
    assert f"this machine's clock says {moment(now)}" in finding.what
    return finding


@pytest.mark.parametrize(
    ("now", "waits_for"),
    [
        (EARLY_S, AwaitedClock.OWN_CLOCK),
        (START_S, AwaitedClock.HUB_CLOCK),
        (GOOD_S, AwaitedClock.HUB_CLOCK),
        (END_S - 1, AwaitedClock.HUB_CLOCK),
        (END_S, None),
    ],
)
def test_a_hub_that_says_expired_is_believed_only_where_this_clock_agrees(
    own: Identity, now: float, waits_for: AwaitedClock | None
) -> None:
    finding = found(expired(600 * DAY_S), own, now)
    assert finding.waits_for is waits_for
    assert f"the coordinator's clock says {moment(600 * DAY_S)}" in finding.what
    assert finding.has_expired == ("heterorl-node token DIR --role sampler" in finding.fix) == (now == END_S)


def test_a_hub_that_does_not_say_its_time_is_judged_without_it(own: Identity) -> None:
    finding = found(expired(None), own, GOOD_S)
    assert finding.waits_for is AwaitedClock.HUB_CLOCK
    assert finding.what.startswith("this machine's clock says 1970-07-20")


@pytest.mark.parametrize(
    ("now", "waits_for", "ends"),
    [(EARLY_S, AwaitedClock.OWN_CLOCK, False), (GOOD_S, None, False), (END_S, None, True)],
)
def test_a_hub_that_closes_the_connection_is_judged_by_the_dates_that_are_known(
    own: Identity, now: float, waits_for: AwaitedClock | None, ends: bool
) -> None:
    finding = found(closed(), own, now)
    assert (finding.waits_for, finding.has_expired) == (waits_for, ends)
    assert ends or f"valid from {moment(START_S)} to {moment(END_S)}" in finding.what


def test_a_hub_whose_certificate_is_not_valid_here_points_at_this_clock(own: Identity) -> None:
    finding = found(closed(TlsFailure.HUB_DATES), own, GOOD_S)
    assert finding.waits_for is AwaitedClock.OWN_CLOCK
    assert "renew the hub's certificate" in finding.fix


def test_other_failures_and_calls_without_tls_say_nothing_of_clocks(own: Identity) -> None:
    assert compare_clocks(RefusedError(Reason.BUSY, "busy"), own, now=GOOD_S) is None
    assert compare_clocks(closed(None), own, now=GOOD_S) is None
    assert compare_clocks(expired(600 * DAY_S), None, now=GOOD_S) is None


def test_a_clock_beyond_the_calendar_is_written_as_it_is() -> None:
    assert moment(1e18) == "1e+18 s"
