"""Operators' orders: who is held back, who is shut out, where the run moves, what the learner is to do; pure.

    command --work.verbs decides--> Order --ledger--> Orders --> leases, admission, status, the learner

An order is an operator's word about one thing, and the newest one about a thing replaces the one before. So
the ledger has as many as there are things, and each says who gave it, when and why. One that is undone stays,
for that reason, and holds no longer.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from node.values.fact import Gone
from node.values.operator_order import DRAIN, MOVE, PAUSE, REVOKE, ROLLBACK, SET, Order, OrderAnswer

FOR_LEARNER: Final = frozenset({SET, ROLLBACK})
"""Verbs whose orders the learner is sent, and answers."""

PAUSED: Final = "paused"
DRAINED: Final = "drained"
"""Waits of samplers that are held back, as grants name them; DRAINED is also a state in the status."""

UNUSUAL_S: Final = 86_400.0
"""How long the status shows that the learner has refused an order."""


class Orders:
    """The newest order about each thing."""

    def __init__(self, orders: Iterable[Order] = ()) -> None:
        self._orders: dict[str, Order] = {}
        self._holding: dict[str, dict[str, Order]] = {}
        self._overdue: dict[str, Order] = {}
        for order in orders:
            self.apply(order)

    def apply(self, order: Order | Gone) -> None:
        self._overdue.pop(order.key, None)
        before = self._orders.pop(order.key, None)
        if before is not None:
            self._holding.get(before.verb, {}).pop(before.about, None)
        if isinstance(order, Order):
            self._orders[order.key] = order
            if order.holds:
                self._holding.setdefault(order.verb, {})[order.about] = order
            if not order.is_carried_out:
                self._overdue[order.key] = order

    def __len__(self) -> int:
        return len(self._orders)

    def newest(self, verb: str, about: str = "") -> Order | None:
        """Return the newest order of a verb about a thing, whatever became of it."""
        return self._orders.get(f"{verb} {about}".rstrip())

    def of(self, verb: str) -> Mapping[str, Order]:
        """Return the orders of a verb that hold, by what they are about."""
        return self._holding.get(verb, {})

    def listed(self, verb: str) -> tuple[Order, ...]:
        """Return the orders of a verb that are not undone, those that were refused too."""
        found = (order for order in self._orders.values() if order.verb == verb and not order.is_undone)
        return tuple(sorted(found, key=lambda order: order.about))

    @property
    def pause(self) -> Order | None:
        """The order that pauses the run; None: it is not paused."""
        return self.of(PAUSE).get("")

    @property
    def revoked(self) -> Collection[str]:
        """Node ids of all who are shut out."""
        return self.of(REVOKE).keys()

    @property
    def notice(self) -> bytes:
        """The signed notice of where the coordinator will be; empty: it stays."""
        move = self.of(MOVE).get("")
        return b"" if move is None else move.value.encode()

    def held_back(self, sampler_id: str) -> str:
        """Return why a sampler is leased nothing by an operator's word; empty: it may be."""
        if self.pause is not None:
            return PAUSED
        return DRAINED if sampler_id in self.of(DRAIN) else ""

    def overdue(self) -> tuple[Order, ...]:
        """Return the orders of one verb that are to be carried out; none: all are."""
        waiting = self._overdue.values()
        first = next(iter(waiting), None)
        return tuple(order for order in waiting if first is not None and order.verb == first.verb)

    def for_learner(self) -> tuple[Order, ...]:
        """Return the orders that the learner is sent, the oldest first; see LearnerOrders."""
        told = (order for order in self._orders.values() if order.verb in FOR_LEARNER)
        return tuple(sorted(filter(_concerns_learner, told), key=lambda order: (order.at_s, order.key)))

    def answered(self, told: OrderAnswer) -> Order | None:
        """Return an order with the learner's answer; None: there is no such order, or it was answered."""
        for order in self._orders.values():
            if order.verb in FOR_LEARNER and order.order_id == told.order_id and not order.answer:
                return replace(order, answer=told.answer, is_refused=told.is_refused)
        return None

    def unusual(self, now: float) -> tuple[str, ...]:
        """Return, a line each, what the learner has not answered, and what it has refused in the last day."""
        orders = [order for order in self._orders.values() if order.verb in FOR_LEARNER]
        waiting = [one for one in orders if not one.answer]
        refused = [one for one in orders if one.is_refused and one.for_s(now) <= UNUSUAL_S]
        return (
            *(f"order not answered by the learner: {one}, {one.remark}" for one in waiting),
            *(f"order refused by the learner: {one}, {one.origin}: {one.answer}" for one in refused),
        )


def _concerns_learner(order: Order) -> bool:
    """Whether the learner is to do something, or a value of a setting holds."""
    return not order.answer or (order.verb == SET and bool(order.known_value))
