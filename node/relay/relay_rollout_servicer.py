"""RolloutService at a relay: takes groups in and serves no other rpc."""

from typing import NoReturn

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.errors import Reason, RefusedError
from node.relay.forwarder import Forwarder
from node.rollout import Verdict
from node.rpc.auth import Context, peer_of
from node.serving.submitter import submitter
from node.telemetry.transfer_metrics import TransferMetrics
from node.wire.rollouts import group_from_wire, verdict_to_wire


class RelayRolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Checks what can be checked without the run's leases; the coordinator judges the rest."""

    def __init__(self, forwarder: Forwarder, *, run_id: str, metrics: TransferMetrics) -> None:
        self._forwarder = forwarder
        self._metrics = metrics
        self._run_id = run_id

    async def SubmitRollouts(  # noqa: N802 - the rpc's name
        self, request: rollout_pb2.SubmitRolloutsRequest, context: Context
    ) -> rollout_pb2.SubmitRolloutsResponse:
        """Spool a group; the coordinator's verdict follows in a heartbeat, if it is another one."""
        sampler_id = submitter(peer_of(context), request.sampler_id)
        try:
            group = group_from_wire(request.group)
        except RefusedError as refused:
            return _answer(Verdict.MALFORMED, str(refused))
        if group.run_id != self._run_id:
            return _answer(Verdict.FOREIGN, f"this is run {self._run_id}, not {group.run_id[:100]!r}")
        data = request.group.SerializeToString()
        self._metrics.count_rollouts(received_bytes=len(data))
        is_new = await self._forwarder.take(sampler_id, group.group_id, data)
        return _answer(Verdict.SPOOLED if is_new else Verdict.DUPLICATE)

    async def LeasePrompts(self, request: object, context: object) -> NoReturn:  # noqa: N802
        raise _not_here()

    async def ReleaseLeases(self, request: object, context: object) -> NoReturn:  # noqa: N802
        raise _not_here()

    def DrainRollouts(self, request_iterator: object, context: object) -> NoReturn:  # noqa: N802
        raise _not_here()


def _answer(verdict: Verdict, detail: str = "") -> rollout_pb2.SubmitRolloutsResponse:
    return rollout_pb2.SubmitRolloutsResponse(verdict=verdict_to_wire(verdict), detail=detail)


def _not_here() -> RefusedError:
    return RefusedError(
        Reason.WRONG_ROLE, "a relay takes groups in and does not lease or deliver", fix="dial the coordinator"
    )
