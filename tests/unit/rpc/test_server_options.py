"""The options that a port gives gRPC before it serves anyone."""

import asyncio
from typing import Any, NoReturn

import grpc.aio
import pytest

from node.identity.revocation import RevocationList
from node.rpc.calls.live_rpcs import Admission
from node.rpc.calls.server import Audience, RpcServer, ServerLimits
from node.rpc.channel import Keepalive
from node.system.clock import SystemClock
from node.values.limits import MESSAGE_BYTES, ROLLOUT_MESSAGE_BYTES


class Told(Exception):  # noqa: N818 - carries what was told
    """Options and the number of rpcs at once."""

    def __init__(self, options: dict[str, Any], concurrent_rpcs: int) -> None:
        self.options = options
        self.concurrent_rpcs = concurrent_rpcs


async def told(monkeypatch: pytest.MonkeyPatch, audience: Audience, limits: ServerLimits) -> Told:
    def tell(*, options: list[tuple[str, Any]], maximum_concurrent_rpcs: int, **_: object) -> NoReturn:
        raise Told(dict(options), maximum_concurrent_rpcs)

    monkeypatch.setattr(grpc.aio, "server", tell)
    with pytest.raises(Told) as raised:
        await server(audience=audience, limits=limits).run(ready=lambda: None, stopping=asyncio.Event())
    return raised.value


def server(*, listen: str = "127.0.0.1:0", **options: Any) -> RpcServer:
    return RpcServer(
        "port",
        listen=listen,
        servicers=(),
        identity=None,
        admission=Admission("run", RevocationList(), SystemClock(), lambda *, service, reason: None),
        drain_grace_s=0.0,
        **options,
    )


@pytest.mark.parametrize(
    ("audience", "most_bytes"),
    [(Audience.MEMBERS, ROLLOUT_MESSAGE_BYTES), (Audience.STRANGERS, MESSAGE_BYTES["EnrolmentService"])],
)
async def test_a_port_reads_messages_as_large_as_its_callers_may_send(
    monkeypatch: pytest.MonkeyPatch, audience: Audience, most_bytes: int
) -> None:
    limits = ServerLimits(concurrent_rpcs=7, handshake_s=2.5, keepalive=Keepalive(ping_after_s=3.0))
    found = await told(monkeypatch, audience, limits)
    assert found.options["grpc.max_receive_message_length"] == most_bytes
    assert found.options["grpc.max_send_message_length"] == ROLLOUT_MESSAGE_BYTES
    assert found.options["grpc.server_handshake_timeout_ms"] == 2500
    assert found.options["grpc.so_reuseport"] == 0
    assert found.options.items() >= dict(limits.keepalive.server_options).items()
    assert found.concurrent_rpcs == 7
