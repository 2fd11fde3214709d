"""The clients' half of RolloutService: lease prompts, release leases, submit groups."""

from collections.abc import Sequence
from typing import Final

import grpc.aio

from heterorl.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from node.clients.rollouts.submission_stream import SubmissionStream
from node.rpc.call_ends import call
from node.values.groups.failure import FailedLease, detail_of
from node.values.groups.rollout import EncodedGroup, LeaseGrant
from node.values.groups.verdict import Verdict
from node.values.policy import PolicyVersion
from node.wire.mapping import from_wire, to_wire

CONTROL_TIMEOUT_S: Final = 40.0
"""Deadline of a lease call. The first one connects, too: with a round trip of five seconds that takes twenty.
What is leased with an answer that comes too late stays out until it expires. Pings find a dead hub sooner."""


class SamplerRolloutClient:
    """Calls of one sampler over one channel. Raises RefusedError and ConnectionLost."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        self._submissions = SubmissionStream(channel)

    async def lease(self, max_leases: int, held: PolicyVersion, *, stays: bool = False) -> LeaseGrant:
        """Lease up to ``max_leases`` prompts, to be sampled with ``held`` or newer.

        Whoever ``stays`` at that version until the answer is here may be leased held-out prompts.
        """
        request = rollout_pb2.LeasePromptsRequest(
            max_leases=max_leases, held=to_wire(common_pb2.PolicyVersion, held), stays=stays
        )
        response = await call(self._stub.LeasePrompts, request, timeout_s=CONTROL_TIMEOUT_S)
        return from_wire(LeaseGrant, response, retry_after_s=max(0.0, response.retry_after_s))

    async def release(self, lease_ids: Sequence[str], failed: Sequence[FailedLease] = ()) -> int:
        """Release leases, unbegun or ``failed``; return how many of them were held."""
        request = rollout_pb2.ReleaseLeasesRequest(
            lease_ids=lease_ids,
            failed=[
                to_wire(rollout_pb2.FailedLease, lease, detail=detail_of(lease.detail)) for lease in failed
            ],
        )
        response = await call(self._stub.ReleaseLeases, request, timeout_s=CONTROL_TIMEOUT_S)
        return response.released

    async def submit(self, group: EncodedGroup) -> tuple[Verdict, str]:
        """Submit a group; safe to repeat. Return the hub's verdict and its reason."""
        return await self._submissions.submit(group)
