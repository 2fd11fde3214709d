"""Spools groups for the coordinator and forwards them for as long as it takes.

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
from typing import Final, TypeVar

from node.clients.rollout_client import RelayRolloutClient
from node.errors import Reason, Recovery, RefusedError
from node.relay.metrics import RelayMetrics
from node.relay.rollout_spool import RolloutSpool, SpooledGroup
from node.rpc.channel import Backoff, ConnectionLost
from node.waits import run_until, side_by_side

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
