"""Takes groups in, spools them, and forwards them to the coordinator for as long as it takes.

sampler --SubmitRollouts--> spool (on disk) --SPOOLED--> sampler
                              |
                              `-- oldest first --> coordinator --any verdict--> gone
                                       ^   |
                                       `---'  away, busy, restarting: after a backoff
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NoReturn, TypeVar

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.clients.rollout_client import RelayRolloutClient
from node.clock import Clock
from node.errors import Reason, Recovery, RefusedError
from node.relay.metrics import RelayMetrics
from node.relay.rollout_spool import RolloutSpool, SpooledGroup
from node.rollout import Verdict
from node.rpc.auth import Context, peer_of
from node.rpc.channel import Backoff, ConnectionLost
from node.serving.submissions import SubmissionDoor
from node.telemetry.transfer_metrics import TransferMetrics
from node.waits import run_until, side_by_side
from node.wire.mapping import verdict_to_wire

logger = logging.getLogger(__name__)

SUBMISSIONS_IN_FLIGHT: Final = 4
"""With one, a coordinator 300 ms away takes no more than three groups a second."""

Answer = TypeVar("Answer")


class Forwarder:
    """A service; owns the spool and its thread."""

    name = "rollout forwarder"

    def __init__(
        self,
        spool: RolloutSpool,
        client: RelayRolloutClient,
        *,
        metrics: RelayMetrics,
        random: Callable[[], float],
    ) -> None:
        """Forward through ``client``; ``random`` draws in [0, 1), for the backoff."""
        self._spool = spool
        self._client = client
        self._metrics = metrics
        self._backoff = Backoff(random)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-spool")
        self._arrived = asyncio.Event()

    async def take(self, sampler_id: str, group_id: str, data: bytes) -> bool:
        """Put a group on disk; False if it is there already. Raises RefusedError: BUSY or DISK."""
        is_new = await self._in_thread(lambda: self._spool.put(sampler_id, group_id, data))
        self._arrived.set()
        return is_new

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Forward groups until ``stopping``; the rest is on disk for the next start."""
        ready()
        try:
            await run_until(stopping, self._forward_for_ever())
        finally:
            await self._in_thread(self._spool.close)
            self._thread.shutdown(wait=False)

    async def _forward_for_ever(self) -> None:
        while True:
            self._arrived.clear()
            try:
                waiting = await self._in_thread(lambda: self._spool.oldest(SUBMISSIONS_IN_FLIGHT))
                if not waiting:
                    await self._arrived.wait()
                    continue
                async with side_by_side() as tasks:
                    for group in waiting:
                        tasks.create_task(self._forward(group))
                self._backoff.reset()
            except (ConnectionLost, RefusedError) as error:
                fields = {"groups": len(self._spool), "detail": str(error)}
                logger.info("groups wait for the coordinator", extra=fields)
                await self._backoff.wait()

    async def _forward(self, group: SpooledGroup) -> None:
        fields = {"group_id": group.group_id, "sampler": group.sampler_id}
        if group.data is None:
            logger.error("group damaged in the spool", extra=fields)
            self._metrics.dropped_groups.inc()
        else:
            try:
                verdict, detail = await self._client.submit(group.data)
            except RefusedError as refused:
                is_final = refused.reason.recovery is Recovery.DROP_REQUEST
                if not is_final and refused.reason is not Reason.BAD_SIGNATURE:
                    raise
                logger.error("group refused by the coordinator", extra={**fields, "detail": str(refused)})
                self._metrics.dropped_groups.inc()
            else:
                self._metrics.count_forwarded(verdict)
                logger.debug("group handed on", extra={**fields, "verdict": verdict.value, "detail": detail})
        await self._in_thread(lambda: self._spool.remove(group.number))

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


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
