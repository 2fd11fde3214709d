"""Builds a relay from its section of the configuration: a mirror of weights and a way to the coordinator.

    upstream --announcements, frames--> mirror --> store --> policy servicer --> samplers, relays
    coordinator <--connections, unbroken-- splice <-- samplers

It decides nothing, reads nothing that passes, and can forge no weight. The server starts first and needs
nobody: what was mirrored before is served while the coordinator is away.
"""

from functools import partial
from pathlib import Path

from heterorl.v1 import policy_pb2_grpc
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.errors import StartupError
from node.identity.revocation import COPY_NAME as REVOCATION_COPY
from node.identity.revocation import RevocationCopy, RevocationList
from node.process.coordinator_link import CoordinatorLink
from node.process.role_context import RoleContext
from node.process.service import Service
from node.relay.config import RelayConfig
from node.relay.metrics import RelayMetrics
from node.relay.splice import Splice
from node.serving.hub_setup import bucket_mirror, make_server, open_store
from node.serving.mirror_setup import make_mirror
from node.serving.policy_servicer import PolicyServicer
from node.values.roles import Role


async def build(context: RoleContext) -> list[Service]:
    """Open what the relay keeps on disk and put its services together.

    Raises StartupError: the store or the bucket cannot be opened, the coordinator's address is missing, or
    TLS is off.
    """
    config = context.config.section(RelayConfig)
    if context.identity is None:
        raise StartupError(
            "A relay tells by TLS whom a sampler wants, and TLS is off", fix="Set node.tls = true."
        )
    revoked = _revocations(context.state_dir)
    link = CoordinatorLink.of(context)
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
            link.hub,
            run_id=context.run.run_id,
            metrics=metrics,
            count_refusal=context.node_metrics.count_refusal,
        ),
    )
    mirror = make_mirror(link, store, relays=config.upstream)
    membership = link.membership(
        Member(context.run.run_id, Role.RELAY),
        reports=PeerReports(
            held=store.head,
            waits_for=lambda: context.node_metrics.waits_for,
            revocations=lambda: revoked.saved,
        ),
        notices=Notices(revocations=revoked.learn),
    )
    services: list[Service] = [server, mirror, membership]
    return services if bucket is None else [*services, bucket]


def _revocations(state_dir: Path) -> RevocationCopy:
    """Read whom the coordinator has shut out. Raises StartupError: an older release's list is there, too."""
    if (older := state_dir / "revoked").exists():
        raise StartupError(
            f"{older} shuts nodes out at this relay alone, which ended in 0.4",
            fix="`heterorl-node revoke` them at the coordinator, whose relays follow, then remove the file.",
        )
    return RevocationCopy(state_dir / REVOCATION_COPY)
