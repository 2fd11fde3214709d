"""Setup that a coordinator and a relay share: the store of policy versions, ports."""

import random
from collections.abc import Callable, Sequence
from typing import Final

import grpc.aio

from node.errors import RefusedError
from node.identity.own_identity import RenewedCertificates
from node.identity.revocation import RevocationList
from node.process.role_context import RoleContext
from node.rpc.calls.live_rpcs import Admission
from node.rpc.calls.server import Audience, Gate, RpcServer, ServerLimits
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.bucket import Bucket
from node.weights.transfer.bucket_mirror import BucketMirror

VERSIONS_DIRECTORY: Final = "versions"


def open_store(context: RoleContext, *, retained_keyframes: int) -> ArtifactStore:
    """Open the policy versions a hub has on disk. Raises StartupError: they cannot be opened."""
    return ArtifactStore(
        context.state_dir / VERSIONS_DIRECTORY,
        public_key=context.run.learner_public_key,
        run_id=context.run.run_id,
        retained_keyframes=retained_keyframes,
    )


def bucket_mirror(context: RoleContext, store: ArtifactStore, url: str | None) -> BucketMirror | None:
    """Return the service that fills the hub's bucket, if it has one. Raises StartupError: it is unusable."""
    if url is None:
        return None
    return BucketMirror(
        store,
        Bucket.open(url, run_id=context.run.run_id, node_id=context.node_id),
        metrics=context.transfer_metrics,
        monotonic=context.clock.monotonic,
        random=random.random,
    )


def make_server(
    context: RoleContext,
    name: str,
    *,
    listen: str,
    revocations: RevocationList,
    servicers: Sequence[Callable[[grpc.aio.Server], None]],
    audience: Audience = Audience.MEMBERS,
    limits: ServerLimits | None = None,
    standby: Callable[[], RefusedError] | None = None,
    renewed: RenewedCertificates | None = None,
    gate: Gate | None = None,
) -> RpcServer:
    """Return a server of the run's for one port; arguments as ``RpcServer``'s and ``Admission``'s."""
    return RpcServer(
        name,
        listen=listen,
        servicers=servicers,
        identity=context.identity,
        admission=Admission(
            context.run.run_id,
            revocations,
            context.clock,
            context.node_metrics.count_refusal,
            standby,
            renewed or RenewedCertificates(),
        ),
        drain_grace_s=context.config.node.drain_timeout_s / 2,
        audience=audience,
        limits=limits,
        gate=gate,
    )
