"""Takes operators' orders while a coordinator runs: the service on ``orders.sock``.

command --GiveOrder--> leader: decided, on disk, in force --orders to the learner--> its answer, if soon
                       standby: refused, with the leader's address
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import grpc.aio

from heterorl.v1 import orders_pb2, orders_pb2_grpc
from node.coordinator.spool import Spool
from node.coordinator.work.verbs import VERBS
from node.errors import Reason, RefusedError
from node.operator_order import Order
from node.rpc.local_socket import LocalServer, answered
from node.wire.mapping import from_wire, to_wire

SOCKET_NAME: Final = "orders.sock"

LONGEST_WAIT_S: Final = 60.0
"""Longest that a command may wait for the learner's answer."""

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

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    async def give(self, asked: Sequence[Order], *, again: bool, wait_s: float) -> tuple[Order, ...]:
        stand = await self._spool.give(asked, again=again)
        if not VERBS[asked[0].verb].is_for_learner:
            return stand
        return await self._spool.answers_to(stand, wait_s=wait_s)

    def listed(self, verb: str) -> tuple[Order, ...]:
        return self._spool.accounts.orders.listed(verb)


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
