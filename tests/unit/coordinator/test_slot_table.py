"""The life of a slot, driven step by step."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest

from node.coordinator.work.balance import Transaction
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.decisions.leasing import Released, ReturnedLeases, release
from node.coordinator.work.slots import next_slots
from node.coordinator.work.slots.bad_prompts import Aside
from node.coordinator.work.slots.slot import (
    FIRST_RETRY_S,
    MAX_ATTEMPTS,
    WAIT_FOR_OTHERS_S,
    SlotState,
    parse_group_id,
)
from node.coordinator.work.slots.slot_table import Claim
from node.values.groups.failure import FailedLease, Failure
from node.values.groups.verdict import Verdict
from support.coordinator import BOUNDS, NOW_S, RETRY_S, TTL_S, Desk, make_accounts, make_answer
from support.present import present


@pytest.fixture
def desk() -> Desk:
    return Desk()


def state(desk: Desk, number: int = 0) -> SlotState:
    return desk.accounts.slots.open_slots[number].state


def refuse(desk: Desk, lease_id: str) -> None:
    parsed = present(parse_group_id(lease_id))
    slot = desk.accounts.slots.refused(*parsed)
    if slot is not None:
        desk.accounts.apply(Transaction(slots=(slot,)), now=desk.now)


def test_an_expired_lease_is_not_lost_while_nobody_else_has_the_prompt(desk: Desk) -> None:
    desk.lease("s1")
    desk.expire(TTL_S)
    assert not desk.accounts.slots.renew("s1", "0.1", now=desk.now)
    desk.lease("s2")
    assert desk.accounts.slots.renew("s1", "0.1", now=desk.now)


@pytest.mark.parametrize("lease_id", ["7.1", "0.2", "nonsense", "", "0.0", "-1.1", "0.1.1", "00.1", "0.1\n"])
def test_a_lease_that_was_never_granted_is_lost(desk: Desk, lease_id: str) -> None:
    desk.lease("s1")
    assert desk.accounts.slots.renew("s1", lease_id, now=desk.now)


def test_a_lease_given_back_goes_to_the_next_sampler_and_costs_no_attempt(desk: Desk) -> None:
    for attempt in range(1, 3 * MAX_ATTEMPTS):
        assert desk.lease("s1") == [f"0.{attempt}"]
        assert desk.release("s2", f"0.{attempt}") == 0
        assert desk.release("s1", f"0.{attempt}", f"0.{attempt}", "5.1", "x") == 1
    assert desk.accounts.slots.claim(0, 1, "s1") is Claim.NEVER_GRANTED


def test_a_lease_given_back_leaves_the_expired_attempt_before_it_the_chance_to_win(desk: Desk) -> None:
    desk.lease("s1")
    desk.expire(TTL_S)
    assert desk.lease("s2") == ["0.2"]
    desk.release("s2", "0.2")
    assert desk.submit("0.1", "s1").verdict is Verdict.SPOOLED


def test_a_refused_group_puts_its_slot_up_again_five_times_and_no_more(desk: Desk) -> None:
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert desk.lease() == [f"0.{attempt}"]
        desk.submit(f"0.{attempt}")
        refuse(desk, f"0.{attempt}")
    assert desk.accounts.slots.counts()[SlotState.ABANDONED] == 1
    assert desk.lease() == ["1.1"]
    assert desk.submit("0.5").verdict is Verdict.DUPLICATE


def test_a_judgement_on_an_earlier_attempt_does_not_touch_the_winner(desk: Desk) -> None:
    desk.lease()
    desk.submit("0.1")
    refuse(desk, "0.1")
    desk.lease()
    desk.submit("0.2")
    refuse(desk, "0.1")
    assert state(desk) is SlotState.SPOOLED
    assert desk.accounts.slots.judged(0, 1, Verdict.ACCEPTED) is None


RAISED = Failure.PROMPT_FAILED


def test_a_slot_with_a_fault_waits_and_goes_to_another_sampler_first(desk: Desk) -> None:
    desk.lease("s1")
    desk.fail("0.1", "s1", fault=RAISED)
    assert desk.lease("s2") == ["1.1"]
    desk.now += FIRST_RETRY_S
    assert desk.lease("s1") == ["2.1"]
    assert desk.lease("s2") == ["0.2"]


def test_where_there_is_no_other_sampler_a_slot_that_failed_is_given_up_and_its_prompt_comes_back(
    desk: Desk,
) -> None:
    desk.lease("s1")
    desk.fail("0.1", "s1", fault=RAISED)
    desk.expire(WAIT_FOR_OTHERS_S - 1)
    assert state(desk) is SlotState.AVAILABLE
    desk.expire(1)
    assert desk.accounts.slots.counts()[SlotState.ABANDONED] == 1
    (bad,) = desk.accounts.bad_prompts.newest(5)
    assert (bad.said_by, bad.retry_at_s) == (("s1",), NOW_S + RETRY_S)


@pytest.mark.parametrize("how", ["the learner refuses it", "it is malformed"])
def test_a_slot_does_not_wait_once_a_sampler_has_answered_its_prompt(desk: Desk, how: str) -> None:
    desk.lease("s1")
    desk.fail("0.1", "s1", fault=RAISED)
    desk.now += FIRST_RETRY_S
    assert desk.lease("s2") == ["0.2"]
    if how == "it is malformed":
        desk.submit("0.2", "s2", group=make_answer(desk.accounts, "0.2", prompt_index=49))
    else:
        desk.submit("0.2", "s2")
        refuse(desk, "0.2")
    assert desk.lease("s3") == ["0.3"]


def test_suspects_are_a_small_part_of_a_grant(desk: Desk) -> None:
    for lease_id in desk.lease("s1", 4):
        desk.fail(lease_id, "s1", fault=RAISED)
    desk.now += 60
    assert desk.lease("s2", 4) == ["0.2", "4.1", "5.1", "6.1"]


def test_one_sampler_fails_a_prompt_as_often_as_it_likes_and_others_still_get_it(desk: Desk) -> None:
    for _ in range(20):
        for lease_id in desk.lease("liar", 4):
            desk.fail(lease_id, "liar", fault=Failure.PROMPT_TOO_LONG)
        desk.now += RETRY_S
        desk.expire(0)
    assert {desk.accounts.bad_prompts.aside(n, "s1", now=desk.now) for n in range(50)} == {Aside.NOT}
    desk.trust("s1")
    assert len(desk.lease("s1", 6)) == 6


def test_a_lease_given_back_unbegun_has_not_failed_whatever_else_is_said_of_it(desk: Desk) -> None:
    desk.lease("s1", 2)
    failed = tuple(FailedLease(name, RAISED, "") for name in ("0.1", "1.1", "1.1", "9.1"))
    released = release(desk.accounts, ReturnedLeases("s1", ("0.1",), failed), now=desk.now)
    assert desk.settle(released) == Released(2, (RAISED,))
    assert [slot.had_fault() for slot in desk.accounts.slots.open_slots.values()] == [False, True]


@pytest.mark.parametrize(("lease_id", "sampler"), [("0.1", "s2"), ("0.2", "s1"), ("9.1", "s1"), ("x", "s1")])
def test_only_the_holder_of_a_lease_fails_it(desk: Desk, lease_id: str, sampler: str) -> None:
    desk.lease("s1")
    assert desk.fail(lease_id, sampler, fault=Failure.PROMPT_TOO_LONG) == 0
    assert state(desk) is SlotState.LEASED


def fail_everywhere(desk: Desk, lease_id: str) -> None:
    """Fail the prompt as s1, who holds the lease, and as s2."""
    desk.fail(lease_id, "s1", fault=Failure.PROMPT_TOO_LONG)
    desk.now += FIRST_RETRY_S
    (again,) = desk.lease("s2")
    desk.fail(again, "s2", fault=Failure.PROMPT_TOO_LONG)


def test_a_prompt_that_is_aside_is_passed_over_until_it_is_due_and_then_for_twice_as_long() -> None:
    desk = Desk(make_accounts(prompts=2), bounds=replace(BOUNDS, batch_groups=8))
    desk.trust("s1", "s3")
    fail_everywhere(desk, desk.lease("s1")[0])
    (bad,) = desk.accounts.bad_prompts.newest(5)
    numbers = [parse_group_id(lease_id)[0] for lease_id in desk.lease("s3", 3)]  # type: ignore[index]
    indices = {desk.accounts.slots.open_slots[number].prompt_index for number in numbers}
    assert indices == {1 - bad.prompt_index}
    assert desk.accounts.slots.counts()[SlotState.SKIPPED] >= 1
    for number in numbers:
        desk.submit(f"{number}.1", "s3")
        desk.train(desk.accounts.last_step + 1, f"{number}.1")
    desk.now += RETRY_S
    (due,) = [
        i
        for i in desk.lease("s1", 2, held=3)
        if desk.accounts.slots.open_slots[int(i.split(".")[0])].prompt_index == bad.prompt_index
    ]
    desk.fail(due, "s1", fault=RAISED)
    desk.now += FIRST_RETRY_S
    desk.fail(desk.lease("s2", held=3)[0], "s2", fault=RAISED)
    (bad,) = desk.accounts.bad_prompts.newest(5)
    assert (bad.times, bad.reason, bad.retry_at_s) == (2, RAISED, desk.now + 2 * RETRY_S)


def test_a_group_for_a_bad_prompt_clears_it_and_counts_against_the_sampler_that_failed_it(desk: Desk) -> None:
    desk.fail(desk.lease("s1")[0], "s1", fault=Failure.PROMPT_TOO_LONG)
    desk.now += FIRST_RETRY_S
    (lease_id,) = desk.lease("s2")
    desk.submit(lease_id, "s2")
    assert len(desk.accounts.bad_prompts) == 0
    s1 = desk.accounts.standings.of("s1")
    assert (s1.faulted, s1.contradicted, s1.allowance, s1.strikes) == (1, 1, 1, 2)


def test_a_prompt_that_two_samplers_failed_and_that_is_answered_later_counts_against_neither() -> None:
    desk = Desk(make_accounts(prompts=2), bounds=replace(BOUNDS, batch_groups=8))
    fail_everywhere(desk, desk.lease("s1")[0])
    (bad,) = desk.accounts.bad_prompts.newest(5)
    desk.now += RETRY_S
    for lease_id in desk.lease("s3", 3):
        desk.submit(lease_id, "s3")
    assert bad.prompt_index not in desk.accounts.bad_prompts
    assert desk.accounts.standings.of("s1").contradicted == desk.accounts.standings.of("s2").contradicted == 0


def test_a_grant_passes_over_a_bounded_number_of_slots_and_the_next_goes_on_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_slots, "SKIPS_PER_GRANT", 3)
    slots = make_accounts(prompts=50).slots
    for first in (0, 3):
        skipped = slots.grant("s1", 2, now=NOW_S, aside=lambda _: Aside.FOR_ALL)
        assert [(slot.number, slot.state) for slot in skipped] == [
            (number, SlotState.SKIPPED) for number in range(first, first + 3)
        ]
        slots.apply(skipped, now=NOW_S)
    (leased,) = slots.grant("s1", 1, now=NOW_S, aside=lambda _: Aside.NOT)
    assert leased.number == 6


def test_five_expiries_of_two_samplers_set_a_prompt_aside_and_five_refusals_do_not(desk: Desk) -> None:
    desk.trust("s1", "s2")
    desk.lease("s1", 2)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        desk.submit(f"1.{attempt}", "s2" if attempt == 3 else "s1")
        refuse(desk, f"1.{attempt}")
        desk.expire(TTL_S)
        desk.trust("s1", "s2")
        desk.lease("s2" if attempt == 2 else "s1", 2)
    assert desk.accounts.slots.counts()[SlotState.ABANDONED] == 2
    assert [(bad.slot, bad.reason) for bad in desk.accounts.bad_prompts.newest(5)] == [(0, Failure.EXPIRED)]


def undelivered(desk: Desk) -> list[int]:
    numbers = []
    while (slot := desk.accounts.slots.open.next_undelivered()) is not None:
        numbers.append(slot.number)
    return numbers


def test_a_group_that_is_out_of_play_before_its_turn_is_not_delivered(desk: Desk) -> None:
    for lease_id in desk.lease("s1", 3):
        desk.submit(lease_id)
    desk.train(1, "0.1")
    refuse(desk, "1.1")
    assert undelivered(desk) == [2]
    desk.submit(desk.lease("s1", 1, held=1)[0])
    assert undelivered(desk) == [1], "the slot's next group is another one"


def steps(call: Callable[[], object]) -> int:
    """Count the lines of Python that a call executes."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return lines


def busy_desk(open_slots: int) -> Desk:
    """Return a desk with so many slots open: leased by other samplers, a few of them in the spool."""
    wide = Bounds(1 << 20, 1 << 20, batch_groups=1 << 20, max_staleness_versions=2, buffer_bytes=1 << 40)
    desk = Desk(make_accounts(prompts=1 << 20), bounds=wide)
    for sampler in range(open_slots // 64):
        granted = desk.lease(f"other-{sampler}", 64)
        desk.submit(granted[0], f"other-{sampler}")
    return desk


def test_what_a_coordinator_does_for_one_sampler_costs_the_same_however_many_slots_are_open() -> None:
    few, many = ((desk, desk.lease("s1", 4)) for desk in (busy_desk(64), busy_desk(4096)))
    acts: dict[str, Callable[[Desk, list[str]], object]] = {
        "lease": lambda desk, mine: desk.lease("s1", 4),
        "renew": lambda desk, mine: desk.accounts.renew("s1", mine, now=desk.now),
        "submit": lambda desk, mine: desk.submit(mine[1]),
        "release": lambda desk, mine: desk.release("s1", mine[0]),
        "deliver": lambda desk, mine: desk.accounts.slots.open.next_undelivered(),
        "step": lambda desk, mine: desk.train(1, "0.1"),
    }
    for name, act in acts.items():
        cost, cost_of_many = (steps(partial(act, *busy)) for busy in (few, many))
        assert cost_of_many <= 1.2 * cost + 50, name
