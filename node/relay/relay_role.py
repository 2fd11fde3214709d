"""Builds a relay from its section of the configuration: a hub without leases, which can forge no weight.

    upstream --announcements, frames--> mirror --> store --> policy servicer --> samplers, relays
    coordinator <--groups-- forwarder <-- spool <-- rollout servicer <--groups-- samplers

The server starts first and needs nobody: what was mirrored before is served while the coordinator is away.
"""

import logging
import random
from functools import partial
from pathlib import Path
from typing import Final

from heterorl.v1 import policy_pb2_grpc, rollout_pb2_grpc
from node import limits
from node.clients.heartbeats import Notices, PeerReports
from node.clients.membership_client import Member, MembershipClient
from node.clients.rollout_client import RelayRolloutClient
from node.errors import StartupError
from node.identity.peer import Peer
from node.identity.revocation import COPY_NAME as REVOCATION_COPY
from node.identity.revocation import FILE_NAME as REVOCATION_FILE
from node.identity.revocation import RevocationList, Revocations
from node.policy import PolicyVersion
from node.process.role_context import RoleContext
from node.process.service import Service
from node.process.stop_order import StopsAfter
from node.relay.config import RelayConfig
from node.relay.forwarder import Forwarder
from node.relay.metrics import RelayMetrics
from node.relay.mirror import Mirror
from node.relay.relay_rollout_servicer import RelayRolloutServicer
from node.relay.rollout_spool import RolloutSpool
from node.rpc.channel import Backoff, Purpose, dial
from node.run import Role
from node.serving.hub_setup import make_server, open_store, submission_door
from node.serving.policy_servicer import PolicyServicer
from node.telemetry.metrics import snapshot
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.sources import Sources, dial_source

logger = logging.getLogger(__name__)

BULK_CONNECTIONS: Final = 4
"""For weights, to each source. A relay passes a frame on when all of it has arrived. The more frames share a
link, the later the first one arrives: at 100 Mbit/s each hop costs 0.8 s with four and 1.6 s with eight."""

SPOOL_FILE: Final = "rollouts.sqlite"


async def build(context: RoleContext) -> list[Service]:
    """Open what the relay keeps on disk and put its services together.

    Raises:
        StartupError: the store or the spool cannot be opened, or the coordinator's address is missing.
    """
    config = context.config.section(RelayConfig)
    target = context.config.node.coordinator
    if target is None:
        raise StartupError("The relay does not know its coordinator", fix="Set node.coordinator = HOST:PORT.")
    clock, run_id = context.clock, context.run.run_id
    store = open_store(context, retained_keyframes=config.retained_keyframes)
    caller = context.identity or Peer(run_id, Role.RELAY, context.node_id)
    control = dial(target, caller, purpose=Purpose.CONTROL, now=clock.now())
    dial_upstream = partial(dial_source, caller=caller, connections=BULK_CONNECTIONS, now=clock.now())
    coordinator = dial_upstream(target, control=control)
    relays = [dial_upstream(address) for address in config.upstream]
    sources = Sources(
        relays or [coordinator],
        last_resort=coordinator if relays else None,
        clock=clock,
        random=random.random,
        metrics=context.transfer_metrics,
    )
    mirror = Mirror(
        store,
        Fetcher(
            sources,
            public_key=context.run.learner_public_key,
            run_id=run_id,
            metrics=context.transfer_metrics,
            random=random.random,
        ),
        watch=sources.announcements,
        count_refusal=context.node_metrics.count_refusal,
        monotonic=clock.monotonic,
        random=random.random,
    )
    metrics = RelayMetrics(context.registry)
    spool = RolloutSpool.open(
        context.state_dir / SPOOL_FILE,
        capacity_groups=config.spool_groups,
        capacity_bytes=config.spool_bytes,
    )
    forwarder = Forwarder(
        spool,
        RelayRolloutClient(dial(target, caller, purpose=Purpose.ROLLOUTS, now=clock.now())),
        metrics=metrics,
        random=random.random,
    )
    rollouts = RelayRolloutServicer(
        forwarder,
        submission_door(context),
        group_bytes=lambda: membership.group_bytes or limits.ROLLOUT_MESSAGE_BYTES,
        metrics=context.transfer_metrics,
        clock=clock,
    )
    policy = PolicyServicer(store, metrics=context.transfer_metrics)
    copy = context.state_dir / REVOCATION_COPY
    server = make_server(
        context,
        "relay",
        listen=config.listen,
        revocations=RevocationList(context.state_dir / REVOCATION_FILE, copy),
        servicers=(
            partial(policy_pb2_grpc.add_PolicyServiceServicer_to_server, policy),
            partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, rollouts),
        ),
    )

    def head() -> PolicyVersion | None:
        announcement = store.announcement()
        return None if announcement is None else announcement.head

    def head_number() -> int:
        held = head()
        return -1 if held is None else held.number

    metrics.watch(head=head_number, spooled=lambda: len(spool), spooled_bytes=lambda: spool.size_bytes)
    membership = MembershipClient(
        control,
        Member(run_id, Role.RELAY),
        reports=PeerReports(
            held=head,
            waits_for=lambda: context.node_metrics.waits_for,
            metrics=lambda: snapshot(context.registry, Role.RELAY),
            revocations=RevocationList(copy).current,
        ),
        notices=Notices(revocations=partial(_keep, copy)),
        clock=clock,
        backoff=Backoff(random.random),
        waiting=context.node_metrics.waiting,
        identity=context.identity,
    )
    serving = StopsAfter(server)
    return [serving, StopsAfter(forwarder, other=serving), mirror, membership]


def _keep(copy: Path, revocations: Revocations) -> None:
    try:
        revocations.save(copy)
    except OSError as error:
        # The answer to the next heartbeat repeats them, because the digest still differs.
        logger.error("revocations not kept", extra={"path": str(copy), "detail": str(error)})
