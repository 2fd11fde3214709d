"""Servers that do no more than gRPC and TLS do, for what a coordinator costs beside them.

    python -m bench.peer_lab.bare_server heartbeats RUN    the two rpcs that the generator calls, on uvloop
    python -m bench.peer_lab.bare_server groups RUN        messages, each answered once it is on disk

Each has the identity of ``RUN``'s coordinator and mutual TLS, prints its address, and serves until SIGTERM.
There is no interceptor, no table of peers and no ledger: heartbeats are parsed and get the same answer,
messages are appended to a file, all that wait with one fsync, and answered with a byte for each group.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import uvloop

from bench.shared.played_run import PlayedRun
from heterorl.v1 import membership_pb2
from node.process.memory import collect_seldom, keep_freed_memory
from node.system import descriptors
from node.values.limits import ROLLOUT_MESSAGE_BYTES
from node.values.roles import Role

SUBMIT_ONE: Final = "/bare/one"
"""A message is a group."""
SUBMIT_SEVERAL: Final = "/bare/several"
"""A message begins with a byte: how many groups follow."""

BATCH_MESSAGES: Final = 128
BATCH_BYTES: Final = 16 << 20
"""In one fsync, as in one of the coordinator."""

Handlers = dict[str, Any]


async def join(_: membership_pb2.JoinRequest, context: object) -> membership_pb2.JoinResponse:
    return membership_pb2.JoinResponse()


async def heartbeat(
    requests: AsyncIterator[membership_pb2.HeartbeatRequest], context: object
) -> AsyncIterator[membership_pb2.HeartbeatResponse]:
    async for _ in requests:
        yield membership_pb2.HeartbeatResponse()


HEARTBEATS: Final[Handlers] = {
    "Join": grpc.unary_unary_rpc_method_handler(
        join, membership_pb2.JoinRequest.FromString, membership_pb2.JoinResponse.SerializeToString
    ),
    "Heartbeat": grpc.stream_stream_rpc_method_handler(
        heartbeat,
        membership_pb2.HeartbeatRequest.FromString,
        membership_pb2.HeartbeatResponse.SerializeToString,
    ),
}


async def serve(run: PlayedRun, service: str, handlers: Handlers) -> None:
    """Serve until SIGTERM."""
    options = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
    server = grpc.aio.server(options=[(option, ROLLOUT_MESSAGE_BYTES) for option in options])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    identity = run.own_identity(Role.COORDINATOR)
    certificates = [(identity.key_pem, identity.certificate_pem)]
    credentials = grpc.ssl_server_credentials(certificates, identity.ca_pem, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    print(json.dumps({"listen": f"127.0.0.1:{port}"}), flush=True)
    await stopping.wait()
    await server.stop(None)


async def serve_groups(run: PlayedRun) -> None:
    """Write what arrives to a file of the run's directory."""
    keep_freed_memory()
    file = os.open(run.directory / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    arrived: asyncio.Queue[tuple[bytes, asyncio.Future[None]]] = asyncio.Queue(BATCH_MESSAGES)

    def written(messages: list[bytes]) -> None:
        os.writev(file, messages)
        os.fdatasync(file)

    async def write() -> None:
        while True:
            batch = [await arrived.get()]
            while not arrived.empty() and sum(len(message) for message, _ in batch) < BATCH_BYTES:
                batch.append(arrived.get_nowait())
            await asyncio.to_thread(written, [message for message, _ in batch])
            for _, is_on_disk in batch:
                is_on_disk.set_result(None)

    async def submit(
        requests: AsyncIterator[bytes], _: object, *, groups_in: Callable[[bytes], int]
    ) -> AsyncIterator[bytes]:
        pending: asyncio.Queue[tuple[int, asyncio.Future[None]]] = asyncio.Queue()

        async def read() -> None:
            async for request in requests:
                is_on_disk: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                await arrived.put((request, is_on_disk))
                pending.put_nowait((groups_in(request), is_on_disk))

        reader = asyncio.create_task(read())
        try:
            while True:
                groups, is_on_disk = await pending.get()
                await is_on_disk
                yield b"1" * groups
        finally:
            reader.cancel()

    counts: dict[str, Callable[[bytes], int]] = {
        SUBMIT_ONE: lambda _: 1,
        SUBMIT_SEVERAL: lambda message: message[0],
    }
    writing = asyncio.create_task(write())
    await serve(
        run,
        "bare",
        {
            rpc.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(
                partial(submit, groups_in=groups_in)
            )
            for rpc, groups_in in counts.items()
        },
    )
    writing.cancel()


if __name__ == "__main__":
    descriptors.raise_limit()
    _run = PlayedRun(Path(sys.argv[2]))
    if sys.argv[1] == "groups":
        asyncio.run(serve_groups(_run))
    else:
        collect_seldom()
        uvloop.run(serve(_run, "heterorl.v1.MembershipService", HEARTBEATS))
