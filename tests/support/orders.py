"""Operators' orders, given on the socket of a coordinator's state directory as the commands do."""

import asyncio
from pathlib import Path

from heterorl.v1 import orders_pb2, orders_pb2_grpc
from node.coordinator.operators.order_desk import SOCKET_NAME
from node.rpc.local_socket import called, local_channel
from node.values.operator_order import Order
from node.wire.mapping import from_wire, to_wire
from support.waiting import WITHIN_S


async def give(
    state_dir: Path, *orders: Order, again: bool = False, wait_s: float = 0.0
) -> tuple[Order, ...]:
    """Send orders; return them as they stand. Raises RefusedError: why they were not taken."""
    request = orders_pb2.GiveOrderRequest(
        orders=[to_wire(orders_pb2.Order, order) for order in orders], again=again, wait_s=wait_s
    )

    def call() -> orders_pb2.GiveOrderResponse:
        with local_channel(state_dir / SOCKET_NAME) as channel:
            assert channel is not None, "no coordinator listens"
            stub = orders_pb2_grpc.OrderServiceStub(channel)
            response = called(stub.GiveOrder, request, timeout_s=WITHIN_S)
        assert response is not None, "the coordinator is gone"
        return response

    response = await asyncio.to_thread(call)
    return tuple(from_wire(Order, order) for order in response.orders)
