"""Builds a relay from its section of the configuration: a mirror of weights and a way to the coordinator.

    upstream --announcements, frames--> mirror --> store --> policy servicer --> samplers, relays
    coordinator <--connections, unbroken-- splice <-- samplers

It decides nothing, reads nothing that passes, and can forge no weight. The server starts first and needs
nobody: what was mirrored before is served while the coordinator is away.
"""

import random
from functools import partial
from pathlib import Path

import grpc.aio

from heterorl.v1 import policy_pb2_grpc
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.membership.membership_client import MembershipClient, Uplink
from node.enrolment.move_notice import MovedCoordinator
from node.errors import StartupError
from node.identity.revocation import COPY_NAME as REVOCATION_COPY
from node.identity.revocation import RevocationCopy, RevocationList
from node.process.role_context import RoleContext
from node.process.service import Service
from node.relay.config import RelayConfig
from node.relay.metrics import RelayMetrics
from node.relay.splice import Splice
from node.rpc.channel import Purpose, dial
from node.rpc.hub import Hub
from node.serving.hub_setup import bucket_mirror, make_server, open_store
from node.serving.mirror_setup import make_mirror
from node.serving.policy_servicer import PolicyServicer
from node.system.backoff import Backoff
from node.values.roles import Role
from node.weights.store.artifact_store import ArtifactStore


async def build(context: RoleContext) -> list[Service]:
    """Open what the relay keeps on disk and put its services together.

    Raises StartupError: the store or the bucket cannot be opened, the coordinator's address is missing, or
    TLS is off.
    """
    config = context.config.section(RelayConfig)
    target, caller = context.config.node.coordinator, context.identity
    if target is None:
        raise StartupError("The relay does not know its coordinator", fix="Set node.coordinator = HOST:PORT.")
    if caller is None:
        raise StartupError(
            "A relay tells by TLS whom a sampler wants, and TLS is off", fix="Set node.tls = true."
        )
    revoked = _revocations(context.state_dir)
    hub = Hub(target)
    moved = MovedCoordinator(hub, context.run, context.state_dir)
    control = dial(hub, caller, purpose=Purpose.CONTROL, now=context.clock.now())
    store = open_store(context, retained_keyframes=config.retained_keyframes)
    metrics = RelayMetrics(context.registry)
    metrics.watch_store(store)
    bucket = bucket_mirror(context, store, config.bucket)
    policy = PolicyServicer(store, metrics=context.transfer_metrics, bucket=bucket)
    server = make_server(
        context,
        "relay",
        listen=config.listen,
        revocations=RevocationList(lambda: revoked.node_ids),
        servicers=(partial(policy_pb2_grpc.add_PolicyServiceServicer_to_server, policy),),
        gate=Splice(
            hub,
            run_id=context.run.run_id,
            metrics=metrics,
            count_refusal=context.node_metrics.count_refusal,
        ),
    )
    mirror = make_mirror(context, store, hub=hub, caller=caller, control=control, relays=config.upstream)
    services: list[Service] = [server, mirror, _membership(context, store, control, moved, revoked)]
    return services if bucket is None else [*services, bucket]


def _membership(
    context: RoleContext,
    store: ArtifactStore,
    control: grpc.aio.Channel,
    moved: MovedCoordinator,
    revoked: RevocationCopy,
) -> MembershipClient:
    return MembershipClient(
        control,
        Member(context.run.run_id, Role.RELAY),
        Uplink(
            context.clock, Backoff(random.random), context.node_metrics.waiting, context.identity, moved.hub
        ),
        reports=PeerReports(
            held=store.head,
            waits_for=lambda: context.node_metrics.waits_for,
            machine=context.machine_figures,
            revocations=lambda: revoked.saved,
        ),
        notices=Notices(revocations=revoked.learn, moved=moved.learn),
    )


def _revocations(state_dir: Path) -> RevocationCopy:
    """Read whom the coordinator has shut out. Raises StartupError: an older release's list is there, too."""
    if (older := state_dir / "revoked").exists():
        raise StartupError(
            f"{older} shuts nodes out at this relay alone, which ended in 0.4",
            fix="`heterorl-node revoke` them at the coordinator, whose relays follow, then remove the file.",
        )
    return RevocationCopy(state_dir / REVOCATION_COPY)
