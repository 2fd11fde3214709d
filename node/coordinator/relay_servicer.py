"""RelayService at the coordinator: one stream a relay, many samplers on it.

    stream --places--> requests, each in a task --answers--.
       '-----------> summary, in parts ----notices---------+--> queue, bounded --> stream

Where the relay does not read, answers fill the queue, requests keep their places, and nothing more is read.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final

from heterorl.v1 import common_pb2, relay_pb2, relay_pb2_grpc
from node.clock import Clock
from node.coordinator.carried_samplers import CarriedSamplers, Session
from node.coordinator.run_members import RunMembers
from node.coordinator.run_rollouts import RunRollouts
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.identity.relay_voucher import VoucherVerifier
from node.limits import CARRIED_HEARTBEATS, CARRIED_REQUESTS, CARRIED_SESSIONS
from node.rpc.auth import Context, peer_of
from node.waits import put_away, side_by_side
from node.wire.mapping import optional_to_wire

REQUESTS_AT_ONCE: Final = 64
"""One relay's requests under way, until their answers are queued: those that wait for a commit share it."""

OUTGOING: Final = 2 * REQUESTS_AT_ONCE
"""Answers and notices that wait to be written."""

HEARD_AT_ONCE: Final = 64
"""Reports of a summary that are noted before others have a turn on the event loop: 5 ms."""

MESSAGE_BYTES: Final = 1 << 20
"""A response is not made larger by another part; one part, leases with their rows, may have 4 MiB."""


class RelayServicer(relay_pb2_grpc.RelayServiceServicer):
    """Serves relays that speak for samplers."""

    def __init__(
        self, members: RunMembers, rollouts: RunRollouts, *, vouchers: VoucherVerifier, clock: Clock
    ) -> None:
        self._members = members
        self._rollouts = rollouts
        self._vouchers = vouchers
        self._clock = clock
        self._sessions_of: dict[Peer, Session] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}
        """Node id of a relay -> what reads its stream."""

    async def Carry(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[relay_pb2.CarryRequest], context: Context
    ) -> AsyncIterator[relay_pb2.CarryResponse]:
        async with aclosing(self.carry(peer_of(context), request_iterator)) as responses:
            async for response in responses:
                yield response

    async def carry(
        self, relay: Peer, requests: AsyncIterator[relay_pb2.CarryRequest]
    ) -> AsyncGenerator[relay_pb2.CarryResponse]:
        """Serve a relay's stream; its newest ends the one before.

        Raises RefusedError: NAME_IN_USE, OVER_LIMIT, MALFORMED.
        """
        carried = CarriedSamplers(
            relay,
            self._members,
            self._rollouts,
            vouchers=self._vouchers,
            sessions_of=self._sessions_of,
            clock=self._clock,
        )
        outgoing: asyncio.Queue[relay_pb2.CarryResponse | None] = asyncio.Queue(OUTGOING)
        reader = asyncio.create_task(self._read(requests, carried, outgoing))
        if (before := self._streams.get(relay.node_id)) is not None:
            before.cancel()
        self._streams[relay.node_id] = reader
        try:
            while (response := await outgoing.get()) is not None:
                yield _joined(response, outgoing)
            if reader.cancelled():
                what = f"{relay.node_id} has opened another stream"
                raise RefusedError(Reason.NAME_IN_USE, what, fix="stop one of two relays of this name")
            reader.result()
        finally:
            await put_away(reader)
            carried.end()
            if self._streams.get(relay.node_id) is reader:
                del self._streams[relay.node_id]

    async def _read(
        self,
        requests: AsyncIterator[relay_pb2.CarryRequest],
        carried: CarriedSamplers,
        outgoing: "asyncio.Queue[relay_pb2.CarryResponse | None]",
    ) -> None:
        places = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def answer(request: relay_pb2.CarriedRequest) -> None:
            try:
                answered = await carried.answer(request)
                await outgoing.put(relay_pb2.CarryResponse(answers=[answered]))
            finally:
                places.release()

        try:
            async with side_by_side() as tasks:
                async for message in requests:
                    _check_size(message)
                    for request in message.requests:
                        await places.acquire()
                        tasks.create_task(answer(request))
                    await self._hear(message, carried, outgoing)
        finally:
            # The writer goes on to the end of the stream, or is cancelled itself.
            if outgoing.full():
                outgoing.get_nowait()
            outgoing.put_nowait(None)

    async def _hear(
        self,
        message: relay_pb2.CarryRequest,
        carried: CarriedSamplers,
        outgoing: "asyncio.Queue[relay_pb2.CarryResponse | None]",
    ) -> None:
        response = relay_pb2.CarryResponse()
        for heard, notice in enumerate(carried.hear(message), start=1):
            if notice is not None:
                response.notices.append(notice)
                if response.ByteSize() >= MESSAGE_BYTES:
                    await outgoing.put(response)
                    response = relay_pb2.CarryResponse()
            if heard % HEARD_AT_ONCE == 0:
                await asyncio.sleep(0)
        if message.summary:
            peers = self._members.requests.peers
            response.summary, response.pause_s = message.summary, peers.pause_s
            if (head := optional_to_wire(common_pb2.PolicyVersion, peers.head)) is not None:
                response.head.CopyFrom(head)
        if message.summary or response.notices:
            await outgoing.put(response)


def _joined(
    response: relay_pb2.CarryResponse, outgoing: "asyncio.Queue[relay_pb2.CarryResponse | None]"
) -> relay_pb2.CarryResponse:
    """Return a response with the answers that wait behind it, up to ``MESSAGE_BYTES``."""
    size_bytes = response.ByteSize()
    while not response.summary and not outgoing.empty() and size_bytes < MESSAGE_BYTES:
        more = outgoing.get_nowait()
        if more is None:
            outgoing.put_nowait(None)
            break
        size_bytes += more.ByteSize()
        response.MergeFrom(more)
    return response


def _check_size(message: relay_pb2.CarryRequest) -> None:
    for what, number, limit in (
        ("requests", len(message.requests), CARRIED_REQUESTS),
        ("changed heartbeats", len(message.heartbeats), CARRIED_HEARTBEATS),
        ("unchanged heartbeats", len(message.unchanged), CARRIED_SESSIONS),
        ("disconnected sessions", len(message.disconnected), CARRIED_SESSIONS),
    ):
        if number > limit:
            raise RefusedError(Reason.OVER_LIMIT, f"a message with {number} {what}, allowed are {limit}")
