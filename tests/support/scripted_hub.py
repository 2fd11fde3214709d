"""The drain side of a hub over real sockets, that remembers all it is told and can be cut."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio

from heterorl.v1 import orders_pb2, rollout_pb2, rollout_pb2_grpc
from node.rpc.calls.caller import Context
from node.values.groups.rollout import RolloutGroup
from node.values.groups.verdict import Verdict
from node.values.operator_order import Order, OrderAnswer
from node.values.run import StepRecord
from node.wire.mapping import from_wire, member_from_wire, to_wire
from node.wire.rollouts import delivery_to_wire, source_of


class ScriptedHub(rollout_pb2_grpc.RolloutServiceServicer):
    """Delivers what it was given, as credits allow, until a step record names it."""

    def __init__(self) -> None:
        self.target = ""
        self.server: grpc.aio.Server | None = None
        self.groups: dict[str, RolloutGroup] = {}
        self.verdicts: list[tuple[str, Verdict]] = []
        self.records: list[StepRecord] = []
        self.hellos: list[rollout_pb2.DrainHello] = []
        self.quarantined: dict[str, str] = {}
        """As the learner said last; told first on each stream."""
        self.orders: dict[str, Order] = {}
        """By key; told first on each stream, and when they change."""
        self.answers: list[OrderAnswer] = []
        self.is_acknowledging = True
        self._cuts = 0
        self._changed = asyncio.Condition()

    async def give(self, *groups: RolloutGroup) -> None:
        """Deliver groups: their ``source``, where they have one."""
        self.groups |= {group.group_id: group for group in groups}
        await self._notify()

    async def order(self, order: Order) -> None:
        """Tell the learner an order, in place of one about the same thing."""
        self.orders[order.key] = order
        await self._notify()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(condition)

    async def cut(self) -> None:
        """Break every stream as a lost connection does."""
        self._cuts += 1
        await self._notify()

    async def close(self) -> None:
        """Go away for good."""
        assert self.server is not None
        await self.server.stop(grace=None)

    def verdicts_of(self, group_id: str) -> list[Verdict]:
        return [verdict for name, verdict in self.verdicts if name == group_id]

    @property
    def trained_group_ids(self) -> list[str]:
        return [name for record in self.records for name in record.group_ids]

    async def DrainRollouts(  # noqa: N802 - named by the proto
        self, request_iterator: AsyncIterator[rollout_pb2.DrainRolloutsRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.DrainRolloutsResponse]:
        cuts = self._cuts
        hello = (await anext(request_iterator)).hello
        self.hellos.append(hello)
        for step in hello.steps:
            self._record(from_wire(StepRecord, step))
        await self._notify()
        sent = set(hello.held_group_ids)
        credits = acknowledged = 0

        async def listen() -> None:
            nonlocal credits
            async for request in request_iterator:
                match request.WhichOneof("message"):
                    case "credit":
                        credits += request.credit.groups
                    case "judgement":
                        judgement = request.judgement
                        self.verdicts.append(
                            (judgement.group_id, member_from_wire(Verdict, judgement, "verdict"))
                        )
                        if self.verdicts[-1][1] is not Verdict.ACCEPTED:
                            self.groups.pop(judgement.group_id, None)
                    case "order_answer":
                        self._note_answer(from_wire(OrderAnswer, request.order_answer))
                    case "quarantine":
                        self.quarantined[request.quarantine.sampler_id] = request.quarantine.reason
                    case "step":
                        self._record(from_wire(StepRecord, request.step))
                await self._notify()

        listening = asyncio.create_task(listen())
        quarantines = rollout_pb2.Quarantines()
        for name, why in self.quarantined.items():
            quarantines.samplers.add(sampler_id=name, reason=why)
        told: dict[str, str] = {}
        try:
            yield rollout_pb2.DrainRolloutsResponse(quarantines=quarantines)
            while True:
                ids = {key: order.order_id for key, order in self.orders.items()}
                if ids != told:
                    told = ids
                    orders = [to_wire(orders_pb2.Order, order) for order in self.orders.values()]
                    yield rollout_pb2.DrainRolloutsResponse(orders=rollout_pb2.LearnerOrders(orders=orders))
                newest = max((record.version for record in self.records), default=0)
                if self._cuts > cuts:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                fresh = [one for name, one in self.groups.items() if name not in sent]
                if self.is_acknowledging and newest > acknowledged:
                    acknowledged = newest
                    message = rollout_pb2.StepAcknowledged(version=newest)
                    yield rollout_pb2.DrainRolloutsResponse(step_acknowledged=message)
                elif fresh and credits:
                    credits -= 1
                    sent.add(fresh[0].group_id)
                    yield _delivery(fresh[0])
                else:
                    async with self._changed:
                        await self._changed.wait()
        finally:
            listening.cancel()

    def _note_answer(self, answer: OrderAnswer) -> None:
        self.answers.append(answer)
        for key, order in self.orders.items():
            if order.order_id == answer.order_id:
                self.orders[key] = replace(order, answer=answer.answer, is_refused=answer.is_refused)

    def _record(self, record: StepRecord) -> None:
        if record not in self.records:
            self.records.append(record)
        for group_id in record.group_ids:
            self.groups.pop(group_id, None)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def scripted_hub() -> AsyncIterator[ScriptedHub]:
    """Serve a hub on a free port of this machine."""
    hub = ScriptedHub()  # type: ignore[abstract]
    server = hub.server = grpc.aio.server()
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(hub, server)
    hub.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield hub
    finally:
        await server.stop(grace=None)


def _delivery(group: RolloutGroup) -> rollout_pb2.DrainRolloutsResponse:
    encoded = source_of(group)
    return delivery_to_wire(replace(encoded, sampler_id=group.sampler_id, spooled_at_s=group.spooled_at_s))
