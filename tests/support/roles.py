"""The context that a role of a test's run is built from."""

from pathlib import Path

from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from node.config.settings import NodeConfig, NodeSection, TelemetrySection
from node.identity.identity_store import IDENTITY_DIRECTORY
from node.identity.own_identity import OwnIdentity
from node.process.role_context import RoleContext
from node.system.clock import Clock, SystemClock
from node.telemetry.metrics import NodeMetrics
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.roles import Role
from support.identity import MadeRun


def role_context(
    made: MadeRun,
    role: Role,
    section: BaseModel,
    *,
    hub: str | None = None,
    clock: Clock | None = None,
    drain_timeout_s: float = 10.0,
) -> RoleContext:
    """Return the context of a role with the identity and state directory that ``made`` has for it."""
    registry, clock = CollectorRegistry(), clock or SystemClock()
    state_dir: Path = made.directory / role
    state_dir.mkdir(exist_ok=True)
    node = NodeSection(state_dir=made.directory, coordinator=hub, drain_timeout_s=drain_timeout_s)
    return RoleContext(
        role=role,
        config=NodeConfig(node, TelemetrySection(), {role.value: section}),
        registry=registry,
        node_metrics=NodeMetrics(registry, roles=[role], clock=clock),
        transfer_metrics=TransferMetrics(registry),
        clock=clock,
        node_id=made.of(role).node_id,
        state_dir=state_dir,
        identity=OwnIdentity(made.of(role), state_dir / IDENTITY_DIRECTORY),
        run=made.run,
    )
