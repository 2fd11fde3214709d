"""A member's way to the coordinator of its run: the same for every role."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import grpc.aio

from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.membership.membership_client import MembershipClient, Uplink
from node.enrolment.move_notice import MovedCoordinator
from node.errors import StartupError
from node.identity.peer import Peer
from node.process.role_context import RoleContext
from node.rpc.channel import Caller, Purpose, dial
from node.rpc.hub import Hub
from node.system.backoff import Backoff


@dataclass(frozen=True, slots=True)
class CoordinatorLink:
    """Connects at the first call."""

    context: RoleContext
    caller: Caller
    moved: MovedCoordinator
    control: grpc.aio.Channel

    @classmethod
    def of(cls, context: RoleContext, *, relays: Sequence[str] = ()) -> Self:
        """Find the coordinator, at the address of the configuration or through ``relays``.

        Raises StartupError: there is neither; or as ``dial``.
        """
        target = context.config.node.coordinator or ""
        if not target and not relays:
            raise StartupError(
                f"The {context.role} does not know its coordinator", fix="Set node.coordinator = HOST:PORT."
            )
        caller = context.identity or Peer(context.run.run_id, context.role, context.node_id)
        hub = Hub(target, relays=relays)
        moved = MovedCoordinator(hub, context.run, context.state_dir)
        return cls(context, caller, moved, _dial(context, hub, caller, Purpose.CONTROL))

    @property
    def hub(self) -> Hub:
        """Where the coordinator is."""
        return self.moved.hub

    def dial(self, purpose: Purpose) -> grpc.aio.Channel:
        """Return another channel. Raises StartupError: as ``dial``."""
        return _dial(self.context, self.hub, self.caller, purpose)

    def membership(self, member: Member, *, reports: PeerReports, notices: Notices) -> MembershipClient:
        """Return the service that keeps this peer in its run.

        The machine's figures are added to ``reports``, and moves of the coordinator to ``notices``.
        """
        context = self.context
        uplink = Uplink(
            context.clock, Backoff(random.random), context.node_metrics.waiting, context.identity, self.hub
        )
        return MembershipClient(
            self.control,
            member,
            uplink,
            reports=replace(reports, machine=context.machine_figures),
            notices=replace(notices, moved=self.moved.learn),
        )


def _dial(context: RoleContext, hub: Hub, caller: Caller, purpose: Purpose) -> grpc.aio.Channel:
    return dial(hub, caller, purpose=purpose, now=context.clock.now())
