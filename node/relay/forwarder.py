"""Takes groups in, spools them, and forwards them to the coordinator for as long as it takes.

sampler --SubmitRollouts--> spool (on disk) --SPOOLED--> sampler
                              |
                              `-- oldest first --> coordinator --any verdict--> gone
                                       ^   |
                                       `---'  away, busy, restarting: after a backoff
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from node.clients.submission_stream import SubmissionStream
from node.errors import Reason, Recovery, RefusedError
from node.relay.metrics import RelayMetrics
from node.relay.rollout_spool import RolloutSpool
from node.rollout import EncodedGroup
from node.rpc.channel import Backoff, ConnectionLost
from node.waits import run_until, side_by_side

logger = logging.getLogger(__name__)

SUBMISSIONS_IN_FLIGHT: Final = 32
SUBMISSIONS_BYTES: Final = 16 << 20
"""Groups forwarded at once: a hundred a second to a coordinator 300 ms away."""

Answer = TypeVar("Answer")


class Forwarder:
    """A service; owns the spool and its thread."""

    name = "rollout forwarder"

    def __init__(
        self,
        spool: RolloutSpool,
        stream: SubmissionStream,
        *,
        metrics: RelayMetrics,
        random: Callable[[], float],
    ) -> None:
        """Forward over ``stream``; ``random`` draws in [0, 1), for the backoff."""
        self._spool = spool
        self._stream = stream
        self._metrics = metrics
        self._backoff = Backoff(random)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-spool")
        self._arrived = asyncio.Event()
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[bool]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def take(self, group: EncodedGroup) -> bool:
        """Put a group on disk; False if it is there already. Raises RefusedError: BUSY or DISK."""
        is_new = await self._on_disk(partial(self._spool.put, group))
        self._arrived.set()
        return is_new

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Forward groups until ``stopping``; the rest is on disk for the next start."""
        ready()
        try:
            await run_until(stopping, self._forward_for_ever())
        finally:
            if self._writer is not None:
                await asyncio.wait({self._writer})
            await self._in_thread(self._spool.close)
            self._thread.shutdown(wait=False)

    async def _forward_for_ever(self) -> None:
        oldest = partial(self._spool.oldest, SUBMISSIONS_IN_FLIGHT, limit_bytes=SUBMISSIONS_BYTES)
        while True:
            self._arrived.clear()
            try:
                waiting = await self._in_thread(oldest)
                if not waiting:
                    await self._arrived.wait()
                    continue
                async with side_by_side() as tasks:
                    for number, group in waiting.items():
                        tasks.create_task(self._forward(number, group))
                self._backoff.reset()
            except (ConnectionLost, RefusedError) as error:
                fields = {"groups": len(self._spool), "detail": str(error)}
                logger.info("groups wait for the coordinator", extra=fields)
                await self._backoff.wait()

    async def _forward(self, number: int, group: EncodedGroup | RefusedError) -> None:
        if isinstance(group, RefusedError):
            logger.error("group damaged in the spool", extra={"detail": str(group)})
            self._metrics.dropped_groups.inc()
        else:
            fields = {"group_id": group.group_id, "sampler": group.sampler_id}
            try:
                verdict, detail = await self._stream.submit(group)
            except RefusedError as refused:
                is_final = refused.reason.recovery is Recovery.DROP_REQUEST
                if not is_final and refused.reason is not Reason.BAD_SIGNATURE:
                    raise
                logger.error("group refused by the coordinator", extra={**fields, "detail": str(refused)})
                self._metrics.dropped_groups.inc()
            else:
                self._metrics.count_forwarded(verdict)
                logger.debug("group handed on", extra={**fields, "verdict": verdict.value, "detail": detail})
        await self._on_disk(partial(self._spool.remove, number))

    async def _on_disk(self, change: Callable[[], bool]) -> bool:
        """Make a change of the spool; those that wait while one is written share the next commit.

        Raises RefusedError: what ``change`` raises; DISK, where none of them is on disk.
        """
        made = asyncio.get_running_loop().create_future()
        self._waiting.append((change, made))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        return bool(await made)

    async def _write(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            work = partial(_made, self._spool, [change for change, _ in waiting])
            try:
                outcomes = await self._in_thread(work)
            except RefusedError as refused:
                outcomes = [refused] * len(waiting)
            for (_, made), outcome in zip(waiting, outcomes, strict=True):
                if made.done():  # its caller has gone
                    continue
                if isinstance(outcome, RefusedError):
                    made.set_exception(outcome)
                else:
                    made.set_result(outcome)

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _made(spool: RolloutSpool, changes: Sequence[Callable[[], bool]]) -> list[bool | RefusedError]:
    outcomes: list[bool | RefusedError] = []
    with spool.one_commit():
        for change in changes:
            try:
                outcomes.append(change())
            except RefusedError as refused:
                if refused.reason is Reason.DISK:
                    raise
                outcomes.append(refused)
    return outcomes
