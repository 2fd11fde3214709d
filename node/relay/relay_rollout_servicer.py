"""RolloutService at a relay: takes groups in and serves no other rpc."""

from collections.abc import Callable
from typing import NoReturn

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.clock import Clock
from node.errors import Reason, RefusedError
from node.relay.forwarder import Forwarder
from node.rollout import Verdict
from node.rpc.auth import Context, peer_of
from node.serving.submissions import SubmissionDoor
from node.telemetry.transfer_metrics import TransferMetrics
from node.wire.mapping import verdict_to_wire


class RelayRolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Takes in what its sampler has signed, unread; the coordinator judges it."""

    def __init__(
        self,
        forwarder: Forwarder,
        door: SubmissionDoor,
        *,
        group_bytes: Callable[[], int],
        metrics: TransferMetrics,
        clock: Clock,
    ) -> None:
        """Serve; ``group_bytes`` returns the size of the largest group of the run, as far as it is known."""
        self._forwarder = forwarder
        self._door = door
        self._group_bytes = group_bytes
        self._metrics = metrics
        self._clock = clock

    async def SubmitRollouts(  # noqa: N802 - the rpc's name
        self, request: rollout_pb2.SubmitRolloutsRequest, context: Context
    ) -> rollout_pb2.SubmitRolloutsResponse:
        """Spool a group; the coordinator's verdict follows in a heartbeat, if it is another one."""
        with self._door.admitted(
            request, peer_of(context), group_bytes=self._group_bytes(), now=self._clock.now()
        ) as submission:
            request.sampler_id = submission.sampler_id
            request.DiscardUnknownFields()
            data = request.SerializeToString()
            self._metrics.count_rollouts(received_bytes=len(data))
            is_new = await self._forwarder.take(submission.sampler_id, submission.group_id, data)
        verdict = Verdict.SPOOLED if is_new else Verdict.DUPLICATE
        return rollout_pb2.SubmitRolloutsResponse(verdict=verdict_to_wire(verdict))

    async def LeasePrompts(self, request: object, context: object) -> NoReturn:  # noqa: N802
        raise _not_here()

    async def ReleaseLeases(self, request: object, context: object) -> NoReturn:  # noqa: N802
        raise _not_here()

    def DrainRollouts(self, request_iterator: object, context: object) -> NoReturn:  # noqa: N802
        raise _not_here()


def _not_here() -> RefusedError:
    return RefusedError(
        Reason.WRONG_ROLE, "a relay takes groups in and does not lease or deliver", fix="dial the coordinator"
    )
