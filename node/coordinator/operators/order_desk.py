"""Takes operators' orders while a coordinator runs: the service on ``orders.sock``.

command --GiveOrder--> leader: decided, on disk, in force --orders to the learner--> its answer, if soon
                       standby: refused, with the leader's address
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import grpc.aio

from heterorl.v1 import orders_pb2, orders_pb2_grpc
from node.coordinator.streams.learner_stream import LearnerStreams
from node.coordinator.transactions.run_ledger import RunLedger
from node.coordinator.work.orders import order_decisions
from node.coordinator.work.orders.order_decisions import Answered, Given
from node.coordinator.work.orders.orders import FOR_LEARNER
from node.coordinator.work.orders.verbs import VERBS
from node.errors import Reason, RefusedError
from node.rpc.local_socket import LocalServer, answered
from node.values.operator_order import PARDON, Order
from node.wire.mapping import from_wire, to_wire

SOCKET_NAME: Final = "orders.sock"

LONGEST_WAIT_S: Final = 60.0
"""Longest that a command may wait for the learner's answer."""

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class Desk(Protocol):
    """Takes orders."""

    async def give(self, asked: Sequence[Order], *, again: bool, wait_s: float) -> tuple[Order, ...]:
        """Take orders; return them as they stand. Raises RefusedError: see OrderService."""
        ...

    def listed(self, verb: str) -> tuple[Order, ...]:
        """Return the orders of a verb that are not undone. Raises RefusedError: STANDBY."""
        ...


class LeaderDesk:
    """Gives orders to the run that this coordinator leads."""

    def __init__(self, ledger: RunLedger, learners: LearnerStreams) -> None:
        self._ledger = ledger
        self._learners = learners
        self._answers: set[asyncio.Event] = set()
        """One for each command that waits for the learner; set when it has answered an order."""
        ledger.when(Given, self._heed)
        ledger.when(Answered, self._note_answer)

    async def give(self, asked: Sequence[Order], *, again: bool, wait_s: float) -> tuple[Order, ...]:
        given = await self._ledger.decide(partial(order_decisions.given, request=asked, again=again))
        if not VERBS[asked[0].verb].is_for_learner:
            return given.stand
        return await self._answers_to(given.stand, wait_s=wait_s)

    def listed(self, verb: str) -> tuple[Order, ...]:
        return self._ledger.accounts.orders.listed(verb)

    async def carry_out_overdue(self) -> None:
        """Carry out the orders that were given while no coordinator ran."""
        while self._ledger.accounts.orders.overdue():
            await self._ledger.decide(order_decisions.overdue)

    def _heed(self, given: Given) -> None:
        for order in given.fresh:
            fields = {name: value for name, value in asdict(order).items() if value and name != "order_id"}
            logger.warning("order of an operator", extra=fields)
        verbs = {order.verb for order in given.fresh}
        if verbs:
            self._learners.wake(has_pardons=PARDON in verbs, has_orders=bool(verbs & FOR_LEARNER))

    def _note_answer(self, answer: Answered) -> None:
        if answer.is_news:
            level = logging.ERROR if answer.told.is_refused else logging.INFO
            logger.log(level, "order answered by the learner", extra=asdict(answer.told))
        for waiting in self._answers:
            waiting.set()

    async def _answers_to(self, orders: Sequence[Order], *, wait_s: float) -> tuple[Order, ...]:
        """Return orders to the learner once it has answered all of them, or ``wait_s`` are over; at once
        where it is not here."""
        answer = asyncio.Event()
        self._answers.add(answer)
        try:
            async with asyncio.timeout(wait_s if self._learners.is_open else 0):
                while not all(order.answer for order in self._now(orders)):
                    await answer.wait()
                    answer.clear()
        except TimeoutError:
            pass
        finally:
            self._answers.discard(answer)
        return self._now(orders)

    def _now(self, orders: Sequence[Order]) -> tuple[Order, ...]:
        known = self._ledger.accounts.orders
        return tuple(known.newest(order.verb, order.about) or order for order in orders)


class StandbyDesk:
    """Refuses every order, with the address of the coordinator that leads."""

    def __init__(self, refusal: Callable[[], RefusedError]) -> None:
        self._refusal = refusal

    async def give(self, asked: Sequence[Order], *, again: bool, wait_s: float) -> tuple[Order, ...]:
        raise self._refusal()

    def listed(self, verb: str) -> tuple[Order, ...]:
        raise self._refusal()


def order_server(state_dir: Path, desk: Desk) -> LocalServer:
    """Return the service that takes orders on the socket in a coordinator's state directory."""
    servicer = OrderServicer(desk)
    return LocalServer(
        "operators' orders",
        state_dir / SOCKET_NAME,
        partial(orders_pb2_grpc.add_OrderServiceServicer_to_server, servicer),
    )


class OrderServicer(orders_pb2_grpc.OrderServiceServicer):
    """Between the wire and a desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def GiveOrder(  # noqa: N802 - the rpc's name
        self, request: orders_pb2.GiveOrderRequest, context: _Context
    ) -> orders_pb2.GiveOrderResponse:
        return await answered(context, self._give(request))

    async def ListOrders(  # noqa: N802 - the rpc's name
        self, request: orders_pb2.ListOrdersRequest, context: _Context
    ) -> orders_pb2.ListOrdersResponse:
        return await answered(context, self._list(request))

    async def _give(self, request: orders_pb2.GiveOrderRequest) -> orders_pb2.GiveOrderResponse:
        asked = tuple(from_wire(Order, order) for order in request.orders)
        wait_s = min(max(0.0, request.wait_s), LONGEST_WAIT_S)
        stand = await self._desk.give(asked, again=request.again, wait_s=wait_s)
        return orders_pb2.GiveOrderResponse(orders=[to_wire(orders_pb2.Order, order) for order in stand])

    async def _list(self, request: orders_pb2.ListOrdersRequest) -> orders_pb2.ListOrdersResponse:
        if request.verb not in VERBS:
            raise RefusedError(Reason.MALFORMED, f"{request.verb[:50]!r} is not a verb")
        orders = self._desk.listed(request.verb)
        return orders_pb2.ListOrdersResponse(orders=[to_wire(orders_pb2.Order, order) for order in orders])
