"""Operators' orders as a pure value: what holds, what an order given again is, what the learner is sent."""

from dataclasses import replace

import pytest
from hypothesis import given as given_by
from hypothesis import settings, strategies

from node.coordinator.work.balance import Transaction
from node.coordinator.work.orders.order_decisions import decided, new_ones
from node.coordinator.work.orders.orders import Orders
from node.coordinator.work.orders.verbs import VERBS, Takes
from node.errors import Reason
from node.values.operator_order import (
    DRAIN,
    EVERYBODY,
    MOVE,
    PARDON,
    PAUSE,
    REVOKE,
    ROLLBACK,
    SET,
    Order,
    OrderAnswer,
)
from support.refusals import refused

KEY = "learner.learning_rate"


class Desk:
    """Gives orders one after the other, as a ledger without a coordinator would."""

    def __init__(self) -> None:
        self.orders = Orders()
        self.given = 0

    def give(self, verb: str, *about: str, again: bool = False, **fields: object) -> tuple[Order, ...]:
        self.given += 1
        asked = tuple(
            replace(Order(verb, one, order_id=f"{self.given}"), **fields)  # type: ignore[arg-type]
            for one in about or ("",)
        )
        stand = decided(self.orders, asked, again=again, now=float(self.given))
        self.apply(new_ones(stand, asked))
        return stand

    def answer(self, order: Order, answer: str, *, is_refused: bool = False) -> None:
        answered = self.orders.answered(OrderAnswer(order.order_id, answer, is_refused))
        self.apply(() if answered is None else (answered,))

    def apply(self, orders: tuple[Order, ...]) -> None:
        for order in Transaction(facts=orders).of(Order):
            self.orders.apply(Order.decoded(order.key, order.encoded()))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_each_sampler_is_held_back_by_the_pause_or_its_own_drain(desk: Desk) -> None:
    desk.give(DRAIN, "s1")
    assert [desk.orders.held_back(name) for name in ("s1", "s2")] == ["drained", ""]
    desk.give(PAUSE)
    assert [desk.orders.held_back(name) for name in ("s1", "s2")] == ["paused", "paused"]
    desk.give(PAUSE, is_undone=True)
    desk.give(DRAIN, "s1", is_undone=True)
    assert desk.orders.held_back("s1") == ""


@pytest.mark.parametrize(("verb", "about"), [(PAUSE, ""), (DRAIN, "s1"), (REVOKE, "s1")])
def test_an_order_that_holds_already_stays_as_it_was_first_given(desk: Desk, verb: str, about: str) -> None:
    (first,) = desk.give(verb, about, because="one")
    (second,) = desk.give(verb, about, because="two")
    assert (first.because, first.at_s, second) == ("one", 1.0, first)
    desk.give(verb, about, is_undone=True)
    (third,) = desk.give(verb, about, because="three")
    assert (third.because, third.at_s) == ("three", 4.0)


@pytest.mark.parametrize(("verb", "about"), [(PARDON, EVERYBODY), (MOVE, "")])
def test_a_deed_is_given_again_each_time(desk: Desk, verb: str, about: str) -> None:
    assert [desk.give(verb, about)[0].at_s for _ in range(2)] == [1.0, 2.0]


def test_a_rollback_is_repeated_only_on_purpose_or_where_it_was_refused(desk: Desk) -> None:
    (first,) = desk.give(ROLLBACK, value="7")
    assert desk.give(ROLLBACK, value="7") == (first,)
    desk.answer(first, "version 10 has the weights of version 7")
    assert desk.give(ROLLBACK, value="7")[0].order_id == first.order_id
    (again,) = desk.give(ROLLBACK, value="7", again=True)
    assert (again.order_id, again.answer) == ("4", "")
    desk.answer(again, "version 7 was removed", is_refused=True)
    assert desk.give(ROLLBACK, value="7")[0].order_id == "5"


def test_an_order_whose_answer_was_lost_may_be_sent_again(desk: Desk) -> None:
    asked = Order(PARDON, "s1", order_id="x")
    first = decided(desk.orders, (asked,), now=1.0)
    desk.apply(first)
    assert decided(desk.orders, (asked,), now=9.0) == first


@pytest.mark.parametrize(
    ("order", "reason", "names"),
    [
        (Order("frob", order_id="1"), Reason.MALFORMED, ["frob"]),
        (Order("resume", order_id="1"), Reason.MALFORMED, ["resume"]),
        (Order(REVOKE, "coordinator", order_id="1"), Reason.MALFORMED, ["coordinator"]),
        (Order(DRAIN, EVERYBODY, order_id="1"), Reason.MALFORMED, [EVERYBODY]),
        (Order(DRAIN, order_id="1"), Reason.MALFORMED, [DRAIN]),
        (Order(PAUSE, "s1", order_id="1"), Reason.MALFORMED, [PAUSE, "s1"]),
        (Order(PAUSE), Reason.MALFORMED, [PAUSE]),
        (Order(DRAIN, "s9", order_id="1", is_undone=True), Reason.MALFORMED, ["s9", "s1"]),
        (Order(PAUSE, because="x" * 5000, order_id="1"), Reason.OVER_LIMIT, ["5000"]),
    ],
)
def test_what_is_no_order_is_refused_by_name(
    desk: Desk, order: Order, reason: Reason, names: list[str]
) -> None:
    desk.give(DRAIN, "s1")
    with refused(reason, *names):
        decided(desk.orders, (order,), now=2.0)


def test_orders_given_at_once_are_of_one_verb_and_few_enough(desk: Desk) -> None:
    for asked in ((), (Order(PAUSE, order_id="1"), Order(MOVE, order_id="1"))):
        with refused(Reason.MALFORMED):
            decided(desk.orders, asked, now=1.0)


def test_to_resume_a_run_that_is_not_paused_changes_nothing(desk: Desk) -> None:
    assert desk.give(PAUSE, is_undone=True)[0].order_id == ""
    assert len(desk.orders) == 0


def test_what_the_learner_refuses_leaves_the_value_before(desk: Desk) -> None:
    def known() -> str:
        newest = desk.orders.newest(SET, KEY)
        return "" if newest is None else newest.known_value

    (first,) = desk.give(SET, KEY, value="1e-3")
    assert known() == ""
    desk.answer(first, "from version 2 on")
    assert known() == "1e-3"
    (unanswered,) = desk.give(SET, KEY, value="2e-3")
    (bad,) = desk.give(SET, KEY, value="7")
    desk.answer(unanswered, "too late", is_refused=True)
    assert known() == "1e-3"
    desk.answer(bad, "at most 1", is_refused=True)
    assert (known(), desk.orders.of(SET)) == ("1e-3", {})
    (undone,) = desk.give(SET, KEY, is_undone=True)
    assert known() == "1e-3"
    desk.answer(undone, "from version 5 on")
    assert (known(), desk.orders.for_learner()) == ("", ())


def test_the_learner_is_sent_what_holds_or_has_no_answer_and_people_what_is_odd(desk: Desk) -> None:
    (rate,) = desk.give(SET, KEY, value="1e-3", by="root")
    (back,) = desk.give(ROLLBACK, value="7")
    assert desk.orders.for_learner() == (rate, back)
    assert len(desk.orders.unusual(2.0)) == 2
    desk.answer(rate, "from version 2 on")
    desk.answer(back, "version 7 was removed", is_refused=True)
    assert [order.about for order in desk.orders.for_learner()] == [KEY]
    (told,) = desk.orders.unusual(2.0)
    assert "version 7 was removed" in told
    assert desk.orders.unusual(90_000.0) == ()


def test_orders_that_no_coordinator_has_carried_out_are_found_by_verb(desk: Desk) -> None:
    desk.give(REVOKE, "s1", "s2")
    desk.give(PARDON, "s3")
    late = desk.orders.overdue()
    assert [order.about for order in late] == ["s1", "s2"]
    desk.apply(tuple(replace(order, is_carried_out=True) for order in late))
    assert [order.about for order in desk.orders.overdue()] == ["s3"]


WORDS = strategies.tuples(
    strategies.sampled_from([PAUSE, DRAIN, REVOKE, PARDON]),
    strategies.sampled_from(["s1", "s2"]),
    strategies.booleans(),
)


@settings(deadline=None)
@given_by(strategies.lists(WORDS, max_size=30))
def test_the_ledgers_orders_say_after_a_restart_what_they_said_before_it(
    words: list[tuple[str, str, bool]],
) -> None:
    desk, facts = Desk(), dict[str, Order]()
    for verb, name, is_undone in words:
        about = "" if VERBS[verb].takes is Takes.NOTHING else name
        if is_undone and about and about not in desk.orders.of(verb):
            continue
        for order in desk.give(verb, about, is_undone=is_undone):
            if order.order_id:
                facts[order.key] = order
        again = Orders(facts.values())
        for sampler in ("s1", "s2"):
            assert again.held_back(sampler) == desk.orders.held_back(sampler)
        assert set(again.revoked) == set(desk.orders.revoked)
        assert set(again.overdue()) <= set(facts.values())
