"""``python -m bench.peer_lab.bare_server RUN``: the least that a heartbeat costs in grpc.aio.

A server of the two rpcs that the generator calls, as the coordinator of ``RUN``: mutual TLS, uvloop, the
generated message classes, and answers that are always the same. It has no interceptor, no table of peers and
no ledger. Prints its address, and serves until SIGTERM.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import uvloop

from heterorl.v1 import membership_pb2
from node.enrolment.init_run import IDENTITY_DIRECTORY
from node.identity.identity_store import load_identity
from node.process.memory import collect_seldom
from node.system import descriptors
from node.values.run import Role


async def join(_: membership_pb2.JoinRequest, context: object) -> membership_pb2.JoinResponse:
    return membership_pb2.JoinResponse()


async def heartbeat(
    requests: AsyncIterator[membership_pb2.HeartbeatRequest], context: object
) -> AsyncIterator[membership_pb2.HeartbeatResponse]:
    async for _ in requests:
        yield membership_pb2.HeartbeatResponse()


HANDLERS: Final[dict[str, Any]] = {
    "Join": grpc.unary_unary_rpc_method_handler(
        join, membership_pb2.JoinRequest.FromString, membership_pb2.JoinResponse.SerializeToString
    ),
    "Heartbeat": grpc.stream_stream_rpc_method_handler(
        heartbeat,
        membership_pb2.HeartbeatRequest.FromString,
        membership_pb2.HeartbeatResponse.SerializeToString,
    ),
}


async def serve(run: Path) -> None:
    """Serve until SIGTERM."""
    identity = load_identity(run / Role.COORDINATOR / IDENTITY_DIRECTORY)
    assert identity is not None
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("heterorl.v1.MembershipService", HANDLERS)
    server.add_generic_rpc_handlers([handler])
    certificates = [(identity.key_pem, identity.certificate_pem)]
    credentials = grpc.ssl_server_credentials(certificates, identity.ca_pem, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    collect_seldom()
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    print(json.dumps({"listen": f"127.0.0.1:{port}"}), flush=True)
    await stopping.wait()
    await server.stop(None)


if __name__ == "__main__":
    descriptors.raise_limit()
    uvloop.run(serve(Path(sys.argv[1])))
