"""Sums and quantiles over peers, however they come, go and change what they send."""

import math

import numpy as np
import pytest
from prometheus_client import Metric

from node.identity.peer import Peer
from node.run import Role
from node.telemetry import fleet_totals
from node.telemetry.fleet_totals import FleetTotals, add_summary, growth
from node.telemetry.metric_layout import Column, Layout

TOKENS, AGE = "heterorl_sampler_tokens", "heterorl_sampler_policy_age_seconds"


def counter(**labels: str) -> Column:
    return Column(TOKENS, "counter", TOKENS + "_total", tuple(sorted(labels.items())), "Tokens.")


GAUGE = Column(AGE, "gauge", AGE, (), "Age.")
LAYOUT = Layout((counter(), GAUGE), (0, 1), 2)


def peer(number: int) -> Peer:
    return Peer("run", Role.SAMPLER, f"s{number}")


def samples(totals: FleetTotals) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "role")): sample.value
        for metric in totals.collect()
        for sample in metric.samples
    }


def put(totals: FleetTotals, number: int, *values: float, layout: Layout = LAYOUT) -> None:
    totals.put(peer(number), layout, np.array(values, dtype=np.float64))


@pytest.fixture
def totals() -> FleetTotals:
    return FleetTotals(Role.SAMPLER)


def test_a_sum_counts_what_each_peer_counted_since_it_was_first_heard_of(totals: FleetTotals) -> None:
    put(totals, 1, 1000.0, 0.0)
    put(totals, 2, 50.0, 0.0)
    put(totals, 1, 1010.0, 0.0)
    put(totals, 2, 51.0, 0.0)
    assert samples(totals)["heterorl_fleet_sampler_tokens_total",] == 11.0


def test_a_sum_never_falls_when_peers_restart_leave_or_are_the_last(totals: FleetTotals) -> None:
    put(totals, 1, 100.0, 0.0)
    put(totals, 1, 130.0, 0.0)
    put(totals, 1, 5.0, 0.0)  # begun anew
    assert samples(totals)["heterorl_fleet_sampler_tokens_total",] == 35.0
    totals.drop(peer(1))
    assert samples(totals)["heterorl_fleet_sampler_tokens_total",] == 35.0
    put(totals, 2, 1.0, 0.0)
    put(totals, 2, 3.0, 0.0)
    assert samples(totals)["heterorl_fleet_sampler_tokens_total",] == 37.0


def test_a_peer_that_sends_one_sample_more_goes_on_where_it_was(totals: FleetTotals) -> None:
    wider = Layout((counter(), GAUGE, counter(kind="new")), (0, 1, 2), 3)
    put(totals, 1, 100.0, 1.0)
    put(totals, 1, 104.0, 1.0, 2.0, layout=wider)
    put(totals, 1, 105.0, 1.0, 2.5, layout=wider)
    assert samples(totals)["heterorl_fleet_sampler_tokens_total",] == 5.0
    assert samples(totals)["heterorl_fleet_sampler_tokens_total", "new"] == 2.5
    assert len(totals) == 1


def test_quantiles_are_over_the_peers_that_are_here_and_have_a_number(totals: FleetTotals) -> None:
    for number in range(10):
        put(totals, number, 0.0, float(number))
    put(totals, 10, 0.0, math.nan)
    name = "heterorl_fleet_sampler_policy_age_seconds"
    found = samples(totals)
    assert [found[name, quantile] for quantile in ("0", "0.5", "0.9", "1")] == [0.0, 4.0, 8.0, 9.0]
    assert (found[name + "_sum",], found[name + "_count",]) == (45.0, 10.0)
    for number in range(9):
        totals.drop(peer(number))
    assert samples(totals)[name, "0"] == 9.0


def test_rows_stay_their_peers_while_others_come_and_go(totals: FleetTotals) -> None:
    rng = np.random.default_rng(0)
    expected: dict[int, float] = {}
    for _ in range(2000):
        number = int(rng.integers(0, 60))
        if rng.random() < 0.45:
            totals.drop(peer(number))
            expected.pop(number, None)
        else:
            value = float(rng.integers(0, 1000))
            put(totals, number, 0.0, value)
            expected[number] = value
    assert {n: dict(totals.values(peer(n)))[GAUGE] for n in expected} == expected
    assert len(totals) == len(expected)


def test_labels_of_one_peer_displace_nobodys(totals: FleetTotals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_totals, "MOST_COLUMNS", 2)
    odd = Layout((counter(kind="a"), counter(kind="b"), counter(kind="c")), (0, 1, 2), 3)
    put(totals, 0, 1.0, 2.0, 3.0, layout=odd)
    put(totals, 1, 1.0, 2.0)
    put(totals, 2, 1.0, 2.0)
    assert {name for name, *_ in samples(totals)} >= {"heterorl_fleet_sampler_tokens_total"}
    assert not [key for key in samples(totals) if key[1:] in (("a",), ("b",), ("c",))]


@pytest.mark.parametrize(
    ("before", "now", "grown"),
    [
        (1.0, 3.0, 2.0),
        (3.0, 1.0, 1.0),
        (1.0, math.inf, 0.0),
        (1.0, math.nan, 0.0),
        (math.nan, 2.0, 2.0),
        (1.0, -5.0, 0.0),
    ],
)
def test_growth_is_what_a_counter_counted_and_never_negative_or_endless(
    before: float, now: float, grown: float
) -> None:
    assert growth(np.array([before]), np.array([now])).tolist() == [grown]


def test_a_summary_of_nothing_says_that_it_is_of_nothing() -> None:
    metric = Metric("heterorl_fleet_x", "", "summary")
    add_summary(metric, {}, np.zeros(0))
    assert {sample.name: sample.value for sample in metric.samples} == {
        "heterorl_fleet_x_sum": 0.0,
        "heterorl_fleet_x_count": 0.0,
    }
