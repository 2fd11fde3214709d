"""The context a role builds its services from, see ``node.values.roles``; imports neither torch nor grpc."""

import pkgutil
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from node.page.live_page import LivePage
from node.system.clock import SystemClock
from node.values.peer_figures import MachineFigures
from node.values.roles import ROLES, Role

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from node.config.settings import NodeConfig
    from node.identity.own_identity import OwnIdentity
    from node.identity.run_description import RunDescription
    from node.process.daemon import Phase
    from node.process.service import Service
    from node.system.clock import Clock
    from node.telemetry.metrics import NodeMetrics
    from node.telemetry.transfer_metrics import TransferMetrics


def in_order(names: Iterable[str]) -> tuple[Role, ...]:
    """Return each role once, in the order in which they start."""
    wanted = set(names)
    return tuple(role for role in Role if role in wanted)


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Everything a role takes from its process."""

    role: Role
    config: "NodeConfig"
    registry: "CollectorRegistry"
    node_metrics: "NodeMetrics"
    transfer_metrics: "TransferMetrics"
    clock: "Clock"
    node_id: str
    """This peer's name in the run; the name in its certificate where there is one."""
    state_dir: Path
    """``node.state_dir/<role>``, which exists and belongs to the role alone."""
    identity: "OwnIdentity | None"
    """None exactly when ``node.tls`` is off."""
    run: "RunDescription"
    announce: "Callable[[Phase], None]" = lambda _: None
    """Tells supervisors that this role stands by; the daemon itself tells them of every other phase."""
    page: LivePage = field(default_factory=lambda: LivePage(SystemClock()))
    """The page of the telemetry port, to which this role may add a part."""

    def machine_figures(self) -> MachineFigures:
        """Return what this role reports of its process and machine."""
        until_s = None if self.identity is None else self.identity.current.not_after_s
        return MachineFigures(
            disk_free_ratio=self.node_metrics.disk_free_ratio,
            certificate_expiry_s=None if until_s is None else until_s - self.clock.now(),
            mended_frames=self.transfer_metrics.mended_frames,
            source_lies=self.transfer_metrics.source_lies,
        )


def load_build(role: Role) -> "Callable[[RoleContext], Awaitable[list[Service]]]":
    """Import a role and return its ``build``. Takes seconds where the role needs torch."""
    build: Callable[[RoleContext], Awaitable[list[Service]]] = pkgutil.resolve_name(ROLES[role].build)
    return build
