"""Decisions on operators' orders: what an order is once it is given, and what changes at once; pure.

The same decision is taken by a coordinator that runs and, where none does, by the command, which records the
order and leaves it to the next coordinator to carry it out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from node.coordinator.work.orders.orders import Orders
from node.coordinator.work.orders.verbs import VERBS, Repeated, Takes, Verb
from node.errors import Reason, RefusedError
from node.values.operator_order import Order, OrderAnswer

if TYPE_CHECKING:
    from node.coordinator.work.accounts import Accounts
    from node.coordinator.work.balance import Transaction
    from node.coordinator.work.decisions.decision import Decision

MOST_ORDERS: Final = 65_536
"""Things that a run may have an order about."""

ORDERS_AT_ONCE: Final = 4096
_TEXT_CHARACTERS: Final = 4096
"""Longest value: a notice of a move."""


def decided(known: Orders, asked: Sequence[Order], *, again: bool = False, now: float) -> tuple[Order, ...]:
    """Return orders as they stand once they are given; one that was given before is returned as it was.

    Raises:
        RefusedError: MALFORMED; there is no such verb, or an order to be undone is not there. OVER_LIMIT.
    """
    _check(known, asked)
    verb = VERBS[asked[0].verb]
    return tuple(_stands(known, verb, order, again=again, now=now) for order in asked)


@dataclass(frozen=True, slots=True)
class Given:
    """Orders that were asked for."""

    stand: tuple[Order, ...]
    """As they stand now."""
    fresh: tuple[Order, ...]
    """The ones of them that were carried out just now."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The learner's answer to an order, as it told it."""

    told: OrderAnswer
    is_news: bool
    """False: there is no such order any more, or it had an answer."""


def given(
    accounts: "Accounts", request: Sequence[Order], *, again: bool = False, now: float
) -> "Decision[Given]":
    """Take orders, and change what they change at once. Raises RefusedError: as ``decided``."""
    from node.coordinator.work.decisions.decision import Decision

    stand = decided(accounts.orders, request, again=again, now=now)
    fresh = new_ones(stand, request)
    return Decision(Given(stand, fresh), _carried_out(accounts, fresh, now=now))


def overdue(accounts: "Accounts", *, now: float) -> "Decision[Given]":
    """Carry out orders of one verb that were given while no coordinator ran."""
    from node.coordinator.work.decisions.decision import Decision

    late = accounts.orders.overdue()
    return Decision(Given(late, late), _carried_out(accounts, late, now=now))


def answered(accounts: "Accounts", request: OrderAnswer, *, now: float) -> "Decision[Answered]":
    """Note the learner's answer to an order, unless either was replaced meanwhile."""
    from node.coordinator.work.balance import Transaction
    from node.coordinator.work.decisions.decision import Decision

    order = accounts.orders.answered(request)
    facts = () if order is None else (order,)
    return Decision(Answered(request, order is not None), Transaction(facts=facts))


def new_ones(stand: Iterable[Order], asked: Iterable[Order]) -> tuple[Order, ...]:
    """Return those of the orders that were given just now."""
    ids = {order.order_id for order in asked}
    return tuple(order for order in stand if order.order_id in ids)


def _carried_out(accounts: "Accounts", fresh: Sequence[Order], *, now: float) -> "Transaction":
    from node.coordinator.work.balance import Transaction

    about = frozenset(order.about for order in fresh if not order.is_undone)
    effect = VERBS[fresh[0].verb].effect(accounts, about, now) if about else Transaction()
    return replace(effect, facts=(*effect.facts, *(replace(one, is_carried_out=True) for one in fresh)))


def _check(known: Orders, asked: Sequence[Order]) -> None:
    if not 1 <= len(asked) <= ORDERS_AT_ONCE:
        raise RefusedError(Reason.MALFORMED, f"{len(asked)} orders, allowed are 1 to {ORDERS_AT_ONCE}")
    if len({order.verb for order in asked}) > 1 or (verb := VERBS.get(asked[0].verb)) is None:
        verbs = ", ".join(VERBS)
        raise RefusedError(Reason.MALFORMED, f"{asked[0].verb[:50]!r} is not a verb; there are {verbs}")
    for order in asked:
        texts = (order.about, order.value, order.because, order.by, order.order_id)
        if len(longest := max(texts, key=len)) > _TEXT_CHARACTERS:
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"a text of {len(longest)} characters in an order, {_TEXT_CHARACTERS} are allowed",
            )
        if not order.order_id or verb.undoes or bool(order.about) is not _is_about_something(verb):
            raise RefusedError(Reason.MALFORMED, f"not an order to {verb.name}: {order.about[:100]!r}")
        if why := (verb.not_about or {}).get(order.about):
            raise RefusedError(Reason.MALFORMED, f"{order.about}: {why}")
    if len(known) + len(asked) > MOST_ORDERS:
        raise RefusedError(Reason.OVER_LIMIT, f"the run has {len(known)} orders, {MOST_ORDERS} are kept")


def _is_about_something(verb: Verb) -> bool:
    return verb.takes in (Takes.NODES, Takes.SAMPLERS, Takes.SETTINGS)


def _stands(known: Orders, verb: Verb, asked: Order, *, again: bool, now: float) -> Order:
    """Return an order as it stands once it is given."""
    before = known.newest(verb.name, asked.about)
    if before is not None and before.order_id == asked.order_id:
        return before  # its answer was lost
    held = "" if before is None else before.known_value
    fresh = replace(asked, at_s=now, is_carried_out=False, answer="", is_refused=False, held=held)
    if asked.is_undone:
        if before is None or not (before.holds or held):
            return _not_there(known, verb, asked)
        return fresh
    is_same = before is not None and before.holds and before.value == asked.value
    is_left = verb.repeated is Repeated.LEFT or (verb.repeated is Repeated.LEFT_UNLESS_AGAIN and not again)
    return before if before is not None and is_same and is_left else fresh


def _not_there(known: Orders, verb: Verb, asked: Order) -> Order:
    """Return the answer where there is nothing to undo: of the run, nothing; of a name, that it is wrong."""
    if not asked.about:
        return replace(asked, order_id="", is_undone=True)
    there = ", ".join(order.about for order in known.listed(verb.name)[:20]) or "none"
    raise RefusedError(
        Reason.MALFORMED,
        f"{asked.about}: there is no order to {verb.name} it",
        fix=f"There is {there}" if there == "none" else f"There are {there}",
    )
