"""The life of a slot, driven step by step."""

import pytest

from node.coordinator.leases import MAX_ATTEMPTS, SlotState, Standing, parse_group_id
from node.rollout import Verdict
from support.coordinator import TTL_S, Desk


@pytest.fixture
def desk() -> Desk:
    return Desk()


def state(desk: Desk, number: int = 0) -> SlotState:
    return desk.accounts.book.open_slots[number].state


def refuse(desk: Desk, lease_id: str) -> None:
    parsed = parse_group_id(lease_id)
    assert parsed is not None
    slot = desk.accounts.book.refused(*parsed)
    if slot is not None:
        desk.accounts.book.apply((slot,), now=desk.now)


def test_a_slot_goes_from_lease_to_training(desk: Desk) -> None:
    assert desk.lease() == ["0.1"]
    assert state(desk) is SlotState.LEASED
    assert desk.submit("0.1").verdict is Verdict.SPOOLED
    assert state(desk) is SlotState.SPOOLED
    desk.train(1, "0.1")
    assert desk.accounts.book.counts()[SlotState.TRAINED] == 1
    assert 0 not in desk.accounts.book.open_slots


def test_an_expired_lease_puts_its_prompt_up_for_another_attempt_first(desk: Desk) -> None:
    desk.lease("s1", 2)
    prompt_index = desk.accounts.book.open_slots[0].prompt_index
    assert desk.expire(TTL_S) == 2
    assert desk.lease("s2", 3) == ["0.2", "1.2", "2.1"]
    assert desk.accounts.book.open_slots[0].prompt_index == prompt_index


def test_a_lease_does_not_expire_before_its_time_or_when_renewed(desk: Desk) -> None:
    desk.lease()
    assert desk.expire(TTL_S - 1) == 0
    assert desk.accounts.book.renew("s1", ["0.1"], now=desk.now) == ()
    assert desk.expire(TTL_S - 1) == 0
    assert desk.expire(1) == 1


def test_only_the_holder_renews_a_lease(desk: Desk) -> None:
    desk.lease("s1")
    assert desk.accounts.book.renew("s2", ["0.1"], now=desk.now + 10) == ("0.1",)
    assert desk.expire(TTL_S) == 1


def test_the_first_attempt_submitted_wins_however_late_it_is(desk: Desk) -> None:
    desk.lease("s1")
    desk.expire(TTL_S)
    desk.lease("s2")
    assert desk.submit("0.1", "s1").verdict is Verdict.SPOOLED
    assert desk.accounts.book.renew("s2", ["0.2"], now=desk.now) == ("0.2",)
    assert desk.submit("0.2", "s2").verdict is Verdict.DUPLICATE


def test_an_expired_lease_is_not_lost_while_nobody_else_has_the_prompt(desk: Desk) -> None:
    desk.lease("s1")
    desk.expire(TTL_S)
    assert desk.accounts.book.renew("s1", ["0.1"], now=desk.now) == ()
    desk.lease("s2")
    assert desk.accounts.book.renew("s1", ["0.1"], now=desk.now) == ("0.1",)


@pytest.mark.parametrize("lease_id", ["7.1", "0.2", "nonsense", "", "0.0", "-1.1", "0.1.1", "00.1", "0.1\n"])
def test_a_lease_that_was_never_granted_is_lost(desk: Desk, lease_id: str) -> None:
    desk.lease("s1")
    assert desk.accounts.book.renew("s1", [lease_id], now=desk.now) == (lease_id,)


def test_a_lease_given_back_goes_to_the_next_sampler_and_costs_no_attempt(desk: Desk) -> None:
    for attempt in range(1, 3 * MAX_ATTEMPTS):
        assert desk.lease("s1") == [f"0.{attempt}"]
        assert desk.release("s2", f"0.{attempt}") == 0
        assert desk.release("s1", f"0.{attempt}", f"0.{attempt}", "5.1", "x") == 1
    assert desk.accounts.book.standing(0, 1, "s1") is Standing.NEVER_GRANTED


def test_a_refused_group_puts_its_slot_up_again_five_times_and_no_more(desk: Desk) -> None:
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert desk.lease() == [f"0.{attempt}"]
        desk.submit(f"0.{attempt}")
        refuse(desk, f"0.{attempt}")
    assert desk.accounts.book.counts()[SlotState.ABANDONED] == 1
    assert desk.lease() == ["1.1"]
    assert desk.submit("0.5").verdict is Verdict.DUPLICATE


def test_a_refused_group_cannot_be_submitted_again(desk: Desk) -> None:
    desk.lease()
    desk.submit("0.1")
    refuse(desk, "0.1")
    assert desk.submit("0.1").verdict is Verdict.DUPLICATE
    assert state(desk) is SlotState.AVAILABLE


def test_a_judgement_on_an_earlier_attempt_does_not_touch_the_winner(desk: Desk) -> None:
    desk.lease()
    desk.submit("0.1")
    refuse(desk, "0.1")
    desk.lease()
    desk.submit("0.2")
    refuse(desk, "0.1")
    assert state(desk) is SlotState.SPOOLED
    assert desk.accounts.book.accepted(0, 1) is None


def test_what_the_learner_trained_on_settles_its_slot_whoever_holds_it(desk: Desk) -> None:
    desk.lease("s1")
    desk.submit("0.1", "s1")
    refuse(desk, "0.1")
    desk.lease("s2")
    assert desk.train(1, "0.1").unknown == ()
    assert desk.accounts.book.renew("s2", ["0.2"], now=desk.now) == ("0.2",)
    assert desk.submit("0.2", "s2").verdict is Verdict.DUPLICATE


def test_groups_wait_for_training_oldest_first(desk: Desk) -> None:
    desk.lease("s1", 3)
    for lease_id in ("2.1", "0.1", "1.1"):
        desk.submit(lease_id)
    assert [slot.number for slot in desk.accounts.book.untrained()] == [0, 1, 2]
