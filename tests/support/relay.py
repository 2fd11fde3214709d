"""Relays as the daemon builds them, on free ports with real TLS, without the daemon."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.config.settings import NodeConfig, NodeSection, TelemetrySection
from node.identity.files import make_private_directory
from node.identity.identity_store import Identity
from node.identity.own_identity import OwnIdentity
from node.process.role_context import RoleContext
from node.relay.config import RelayConfig
from node.relay.relay_role import build
from node.rpc.calls.server import RpcServer
from node.rpc.channel import Purpose, dial
from node.system.clock import SystemClock
from node.telemetry.metrics import NodeMetrics
from node.values.roles import Role
from node.weights.transfer.sources import Source, dial_source
from support.hub import HandPeer
from support.identity import MadeRun
from support.policy_hub import Registry


@dataclass(slots=True)
class RunningRelay:
    """A relay that serves."""

    made: MadeRun
    server: RpcServer
    registry: Registry
    stopping: asyncio.Event
    node_metrics: NodeMetrics
    identity: OwnIdentity

    @property
    def address(self) -> str:
        return self.server.address

    def source(self, identity: Identity | None = None, *, channels: int = 1) -> Source:
        """Return this relay as a peer's source; its channels end with the loop."""
        caller = identity or self.made.sampler
        return dial_source(self.address, caller, connections=channels, now=time.time(), server=Role.RELAY)

    @asynccontextmanager
    async def peer(self, identity: Identity | None = None) -> AsyncIterator[HandPeer]:
        """Connect to the coordinator through this relay, as somebody; None: the sampler."""
        caller = identity or self.made.sampler
        async with dial(self.address, caller, purpose=Purpose.ROLLOUTS, now=time.time()) as channel:
            yield HandPeer(caller, channel)


@asynccontextmanager
async def running_relay(
    made: MadeRun,
    directory: Path,
    *,
    coordinator: str,
    name: str = "relay-1",
    identity: Identity | None = None,
    **settings: Any,
) -> AsyncIterator[RunningRelay]:
    """Run a relay until the body ends; the next one of the same ``directory`` finds what it left."""
    make_private_directory(directory)
    registry, clock = Registry(), SystemClock()
    config = NodeConfig(
        node=NodeSection(state_dir=directory, coordinator=coordinator, drain_timeout_s=2.0),
        telemetry=TelemetrySection(),
        roles={"relay": RelayConfig.model_validate({"listen": "127.0.0.1:0"} | settings)},
    )
    context = RoleContext(
        role=Role.RELAY,
        config=config,
        registry=registry.registry,
        node_metrics=NodeMetrics(registry.registry, roles=["relay"], clock=clock),
        transfer_metrics=registry.metrics,
        clock=clock,
        node_id=name,
        state_dir=directory,
        identity=(own := OwnIdentity(identity or made.issue(Role.RELAY, name), directory)),
        run=made.run,
    )
    serving, *others = await build(context)
    assert isinstance(serving, RpcServer)
    ready, stopping = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serving.run(ready=ready.set, stopping=stopping))
        await ready.wait()
        for service in others:
            tasks.create_task(service.run(ready=lambda: None, stopping=stopping))
        try:
            yield RunningRelay(made, serving, registry, stopping, context.node_metrics, own)
        finally:
            stopping.set()
