"""Builds a relay from its section of the configuration: a hub that decides nothing and can forge no weight.

    upstream --announcements, frames--> mirror --> store --> policy servicer --> samplers, relays
    coordinator <--groups-- forwarder <-- spool <-- rollout servicer <--groups-- samplers
    coordinator <--joins, leases, summaries of heartbeats-- carrier <-- sessions <-- samplers

The server starts first and needs nobody: what was mirrored before is served while the coordinator is away.
"""

import logging
import random
from functools import partial
from pathlib import Path
from typing import Final

import grpc.aio

from heterorl.v1 import membership_pb2_grpc, policy_pb2_grpc, relay_pb2_grpc, rollout_pb2_grpc
from node.clients.heartbeats import Notices, PeerReports
from node.clients.membership_client import Member, MembershipClient, Uplink
from node.clients.submission_stream import SubmissionStream
from node.enrolment.move_notice import MovedCoordinator
from node.errors import StartupError
from node.identity.own_identity import RenewedCertificates
from node.identity.peer import Peer
from node.identity.revocation import COPY_NAME as REVOCATION_COPY
from node.identity.revocation import FILE_NAME as REVOCATION_FILE
from node.identity.revocation import RevocationList, Revocations
from node.process.role_context import RoleContext
from node.process.service import Service, StopsAfter
from node.relay.carried import CarriedMembers, CarriedRollouts
from node.relay.carrier import Carrier
from node.relay.config import RelayConfig
from node.relay.forwarder import Forwarder
from node.relay.metrics import RelayMetrics
from node.relay.mirror import Mirror
from node.relay.rollout_spool import RolloutSpool
from node.relay.sampler_sessions import Sessions
from node.rpc.channel import Backoff, Caller, Purpose, dial
from node.rpc.hub import Hub
from node.rpc.server import RpcServer
from node.run import Role
from node.serving.hub_setup import bucket_mirror, make_server, open_store, submission_door
from node.serving.membership_servicer import MembershipServicer
from node.serving.policy_servicer import PolicyServicer
from node.serving.rollout_servicer import RolloutServicer
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.bucket_mirror import BucketMirror
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.sources import Sources, dial_source

logger = logging.getLogger(__name__)

BULK_CONNECTIONS: Final = 4
"""For weights, to each source. A relay passes a frame on when all of it has arrived. The more frames share a
link, the later the first one arrives: at 100 Mbit/s each hop costs 0.8 s with four and 1.6 s with eight."""

SPOOL_FILE: Final = "rollouts.sqlite"


async def build(context: RoleContext) -> list[Service]:
    """Open what the relay keeps on disk and put its services together.

    Raises StartupError: the store, the spool or the bucket cannot be opened, or the coordinator's address is
    missing.
    """
    config = context.config.section(RelayConfig)
    target = context.config.node.coordinator
    if target is None:
        raise StartupError("The relay does not know its coordinator", fix="Set node.coordinator = HOST:PORT.")
    clock = context.clock
    caller = context.identity or Peer(context.run.run_id, Role.RELAY, context.node_id)
    hub = Hub(target)
    moved = MovedCoordinator(hub, context.run, context.state_dir)
    control = dial(hub, caller, purpose=Purpose.CONTROL, now=clock.now())
    store = open_store(context, retained_keyframes=config.retained_keyframes)
    metrics = RelayMetrics(context.registry)
    spool = RolloutSpool.open(
        context.state_dir / SPOOL_FILE,
        capacity_groups=config.spool_groups,
        capacity_bytes=config.spool_bytes,
    )
    forwarder = Forwarder(
        spool,
        SubmissionStream(dial(hub, caller, purpose=Purpose.ROLLOUTS, now=clock.now())),
        metrics=metrics,
        random=random.random,
    )
    sessions = Sessions()
    # A connection of its own: leases may come with a thousand rows, and groups fill theirs.
    carrying = relay_pb2_grpc.RelayServiceStub(dial(hub, caller, purpose=Purpose.CARRIED, now=clock.now()))
    carrier = Carrier(
        carrying.Carry, sessions, metrics=metrics, monotonic=clock.monotonic, random=random.random
    )
    metrics.watch(store, spool, samplers=lambda: len(sessions), requests=carrier.waiting)
    membership = _membership(context, store, control, moved)
    bucket = bucket_mirror(context, store, config.bucket)
    renewed = RenewedCertificates()
    members = _members(context, sessions, carrier, membership, renewed)
    rollouts = CarriedRollouts(sessions, carrier, forwarder, lambda: membership.group_bytes)
    serving = StopsAfter(_server(context, config, store, members, rollouts, bucket, renewed))
    mirror = _mirror(context, store, _sources(context, config, hub, caller, control))
    services: list[Service] = [
        serving,
        StopsAfter(forwarder, other=serving),
        StopsAfter(carrier, other=serving),
        mirror,
        membership,
    ]
    return services if bucket is None else [*services, bucket]


def _sources(
    context: RoleContext, config: RelayConfig, hub: Hub, caller: Caller, control: grpc.aio.Channel
) -> Sources:
    dial_upstream = partial(dial_source, caller=caller, connections=BULK_CONNECTIONS, now=context.clock.now())
    coordinator = dial_upstream(hub, control=control)
    relays = [dial_upstream(address) for address in config.upstream]
    return Sources(
        relays or [coordinator],
        last_resort=coordinator if relays else None,
        clock=context.clock,
        random=random.random,
        metrics=context.transfer_metrics,
    )


def _mirror(context: RoleContext, store: ArtifactStore, sources: Sources) -> Mirror:
    fetcher = Fetcher(
        sources,
        public_key=context.run.learner_public_key,
        run_id=context.run.run_id,
        metrics=context.transfer_metrics,
        random=random.random,
    )
    return Mirror(
        store,
        fetcher,
        watch=sources.announcements,
        count_refusal=context.node_metrics.count_refusal,
        monotonic=context.clock.monotonic,
        random=random.random,
    )


def _membership(
    context: RoleContext,
    store: ArtifactStore,
    control: grpc.aio.Channel,
    moved: MovedCoordinator,
) -> MembershipClient:
    copy = context.state_dir / REVOCATION_COPY
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
            revocations=RevocationList(copy).current,
        ),
        notices=Notices(revocations=partial(_keep, copy), moved=moved.learn),
    )


def _members(
    context: RoleContext,
    sessions: Sessions,
    carrier: Carrier,
    membership: MembershipClient,
    renewed: RenewedCertificates,
) -> CarriedMembers:
    return CarriedMembers(
        context.node_id,
        sessions,
        carrier,
        context.clock,
        renewed,
        clock_offset_s=lambda: membership.clock_offset_s,
    )


def _server(
    context: RoleContext,
    config: RelayConfig,
    store: ArtifactStore,
    members: CarriedMembers,
    rollouts: CarriedRollouts,
    bucket: BucketMirror | None,
    renewed: RenewedCertificates,
) -> RpcServer:
    policy = PolicyServicer(store, metrics=context.transfer_metrics, bucket=bucket)
    membership_servicer = MembershipServicer(members)
    rollout_servicer = RolloutServicer(rollouts, submission_door(context, hands_on=True))
    revocations = RevocationList(context.state_dir / REVOCATION_FILE, context.state_dir / REVOCATION_COPY)
    return make_server(
        context,
        "relay",
        listen=config.listen,
        revocations=revocations,
        renewed=renewed,
        servicers=(
            partial(policy_pb2_grpc.add_PolicyServiceServicer_to_server, policy),
            partial(membership_pb2_grpc.add_MembershipServiceServicer_to_server, membership_servicer),
            partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, rollout_servicer),
        ),
    )


def _keep(copy: Path, revocations: Revocations) -> None:
    try:
        revocations.save(copy)
    except OSError as error:
        # The answer to the next heartbeat repeats them, because the digest still differs.
        logger.error("revocations not kept", extra={"path": str(copy), "detail": str(error)})
