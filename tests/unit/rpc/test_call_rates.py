"""Token buckets, by hand: how often a peer may call, and what refused calls cost it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.v1 import rollout_pb2
from node.errors import Reason, RefusedError
from node.rpc.calls.call_rates import CallRates, Rate
from node.rpc.calls.rpc_rules import RULES, SUBMIT_ROLLOUTS

RATE = Rate(per_s=2, burst=4, refused=3)


def taken(rates: CallRates, number: int, *, now: float, key: str = "s1") -> int:
    return sum(rates.take(key, RATE, now=now) == 0 for _ in range(number))


def test_a_burst_is_allowed_and_then_the_rate() -> None:
    rates = CallRates()
    assert taken(rates, 10, now=0) == 4
    assert rates.take("s1", RATE, now=0) == pytest.approx(0.5)
    assert taken(rates, 10, now=0.5) == 1
    assert taken(rates, 10, now=100) == 4


def test_a_peers_calls_cost_its_neighbour_nothing() -> None:
    rates = CallRates()
    taken(rates, 10, now=0)
    assert taken(rates, 10, now=0, key="s2") == 4


def test_a_refused_call_costs_more_than_one_that_is_served() -> None:
    rates = CallRates()
    assert taken(rates, 1, now=0) == 1
    rates.charge_refusal("s1", RATE, now=0)  # 4 - 1 - 3
    assert rates.take("s1", RATE, now=0) == pytest.approx(0.5)
    assert taken(rates, 1, now=0.5) == 1
    rates.charge_refusal("s1", RATE, now=0.5)
    assert rates.take("s1", RATE, now=0.5) == pytest.approx(2.0)  # from -3 to 1


def test_messages_that_are_read_in_any_case_wait_for_their_token() -> None:
    rates = CallRates()
    waits = [rates.reserve("s1", RATE, now=0) for _ in range(6)]
    assert waits == pytest.approx([0, 0, 0, 0, 0.5, 1.0])


def test_a_message_of_several_groups_waits_for_the_tokens_of_all() -> None:
    rule = RULES[SUBMIT_ROLLOUTS]
    several = rule.weight(rollout_pb2.SubmitRolloutsRequest(further=[rollout_pb2.EncodedGroup()] * 5))
    alone = [rollout_pb2.SubmitRolloutsRequest(), RefusedError(Reason.MALFORMED, "not a message")]
    assert (several, *map(rule.weight, alone)) == (6, 1, 1)
    assert CallRates().reserve("s1", RATE, now=0, tokens=several) == pytest.approx(1.0)  # 2 of 6 are missing


def test_so_many_buckets_are_kept_and_the_one_used_longest_ago_is_forgotten() -> None:
    rates = CallRates(most_buckets=2)
    for key in ("s1", "s2", "s1", "s3"):
        rates.take(key, RATE, now=0)
    assert len(rates) == 2
    assert taken(rates, 10, now=0, key="s1") == 2
    assert taken(rates, 10, now=0, key="s2") == 4


@given(st.lists(st.floats(0, 3), max_size=60), st.booleans())
def test_no_more_pass_than_burst_and_rate_allow(pauses: list[float], is_refused: bool) -> None:
    rates, now, passed = CallRates(), 0.0, 0
    for pause in pauses:
        now += pause
        if rates.take("s1", RATE, now=now) == 0:
            passed += 1
            if is_refused:
                rates.charge_refusal("s1", RATE, now=now)
    # The last refusal is paid for after it: one call more than the tokens of the time.
    cost = 1 + RATE.refused * is_refused
    assert (passed - 1) * cost < RATE.burst + RATE.per_s * now + 1e-6
