"""A real server on a free port, with real TLS, around whatever servicers a test brings."""

import asyncio
import collections
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from heterorl.v1 import membership_pb2, merge_pb2, model_pb2, policy_pb2, rollout_pb2
from node.errors import Reason, RefusedError
from node.identity.identity_store import Identity
from node.identity.revocation import RevocationList
from node.rpc.call_ends import ConnectionLost, classified
from node.rpc.calls.live_rpcs import Admission, RpcLimits
from node.rpc.calls.server import Audience, RpcServer, ServerLimits
from node.rpc.channel import KEEPALIVE, Keepalive
from node.rpc.strangers.strangers_gate import GateLimits
from node.system.clock import Clock, SystemClock
from support.identity import MadeRun

METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (membership_pb2, merge_pb2, model_pb2, policy_pb2, rollout_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Every rpc of every service, by its path."""

AddServicer = Callable[[grpc.aio.Server], None]


@dataclass(slots=True)
class Serving:
    """A server that runs, and what it counted."""

    server: RpcServer
    stopping: asyncio.Event
    revoked: set[str]
    """Add node ids to shut them out."""
    running: "asyncio.Task[None]"
    refusals: "collections.Counter[tuple[str, Reason]]" = field(default_factory=collections.Counter)

    @property
    def address(self) -> str:
        return self.server.address


@asynccontextmanager
async def serving(
    made: MadeRun,
    *servicers: AddServicer,
    tls: bool = True,
    identity: Identity | None = None,
    listen: str = "127.0.0.1:0",
    audience: Audience = Audience.MEMBERS,
    clock: Clock | None = None,
    drain_grace_s: float = 0.2,
    recheck_s: float = 0.02,
    handshake_s: float = 10.0,
    gate: GateLimits | None = None,
    keepalive: Keepalive = KEEPALIVE,
    revoked: set[str] | None = None,
    **rpc_limits: Any,
) -> AsyncIterator[Serving]:
    """Serve until the body ends, then drain."""
    refusals: collections.Counter[tuple[str, Reason]] = collections.Counter()

    def count_refusal(*, service: str, reason: Reason) -> None:
        refusals[service, reason] += 1

    shut_out: set[str] = set() if revoked is None else revoked
    server = RpcServer(
        "test server",
        listen=listen,
        servicers=servicers,
        identity=(identity or made.coordinator) if tls else None,
        admission=Admission(
            made.run_id, RevocationList(lambda: shut_out), clock or SystemClock(), count_refusal
        ),
        drain_grace_s=drain_grace_s,
        audience=audience,
        limits=ServerLimits(
            rpc=RpcLimits(**rpc_limits),
            recheck_s=recheck_s,
            handshake_s=handshake_s,
            gate=gate,
            keepalive=keepalive,
        ),
    )
    ready, stopping = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.run(ready=ready.set, stopping=stopping))
        is_ready = tasks.create_task(ready.wait())
        await asyncio.wait({running, is_ready}, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield Serving(server, stopping, shut_out, running, refusals)
        finally:
            is_ready.cancel()
            stopping.set()


def recheck_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make servers with default limits recheck live streams often: who was revoked or expired is cut."""
    monkeypatch.setattr("node.rpc.calls.server.ServerLimits", partial(ServerLimits, recheck_s=0.05))


def rpcs(behaviours: dict[str, Callable[..., Any]]) -> AddServicer:
    """Serve just these rpcs: path -> what a servicer's method would be."""

    def add(server: grpc.aio.Server) -> None:
        for path, behaviour in behaviours.items():
            method = METHODS[path]
            handler = getattr(grpc, f"{_kind(method)}_rpc_method_handler")(
                behaviour,
                request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
                response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
            )
            _, service, name = path.split("/")
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))

    return add


def every_service(server: grpc.aio.Server) -> None:
    """Serve every rpc there is; each answers one empty message."""

    def behaviour(method: MethodDescriptor) -> Callable[..., Any]:
        answer = message_factory.GetMessageClass(method.output_type)

        async def hear(request: Any) -> None:
            # A stream that ends before its caller has written may be INTERNAL to the caller.
            if method.client_streaming:
                async for _ in request:
                    pass

        async def respond(request: Any, context: Any) -> Any:
            await hear(request)
            return answer()

        async def respond_many(request: Any, context: Any) -> AsyncIterator[Any]:
            await hear(request)
            yield answer()

        return respond_many if method.server_streaming else respond

    rpcs({path: behaviour(method) for path, method in METHODS.items()})(server)


async def invoke(
    channel: grpc.aio.Channel, path: str, request: bytes = b"", *, timeout_s: float = 10.0
) -> list[bytes]:
    """Call any rpc with one request of raw bytes; give the raw answers."""
    method = METHODS[path]

    async def requests() -> AsyncIterator[bytes]:
        yield request

    call = getattr(channel, _kind(method))(path)(
        requests() if method.client_streaming else request, timeout=timeout_s
    )
    if method.server_streaming:
        return [answer async for answer in call]
    return [await call]


async def refusal_of(channel: grpc.aio.Channel, path: str) -> RefusedError:
    """Return the refusal, asking again where gRPC's client loses it, as every peer does."""
    refused, _ = await counted_refusal(channel, path)
    return refused


async def counted_refusal(channel: grpc.aio.Channel, path: str) -> tuple[RefusedError, int]:
    """Return the refusal, and how often it was asked for.

    A status that overtakes the request is replaced by INTERNAL (github.com/grpc/grpc/issues/36066).
    """
    for times in range(1, 11):
        try:
            with pytest.raises(RefusedError) as refused, classified():
                await invoke(channel, path)
        except ConnectionLost as lost:
            if "Internal error from Core" not in str(lost):
                raise
        else:
            return refused.value, times
    raise AssertionError(f"{path} was lost ten times")


def _kind(method: MethodDescriptor) -> str:
    return ("stream" if method.client_streaming else "unary") + (
        "_stream" if method.server_streaming else "_unary"
    )
