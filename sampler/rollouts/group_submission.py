"""Hands groups in, from a bounded outbox, as often as it takes: the hub answers a repeat with ``duplicate``.

put --> outbox (bounded; full: put waits) --> submit --verdict--> settled
                                                |  ^
                                                |  `-- connection lost, hub busy or restarting: backoff
                                                `-- refused for good: settled without a verdict
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from node.errors import RefusedError
from node.rollout import RolloutGroup, Verdict
from node.rpc.channel import Backoff, ConnectionLost

logger = logging.getLogger(__name__)

UPLOADS_IN_FLIGHT: Final = 4
"""Submissions at once: with one, a hub 300 ms away takes no more than three groups a second."""


class Submit(Protocol):
    """``SamplerRolloutClient.submit``."""

    def __call__(self, group: RolloutGroup) -> Awaitable[tuple[Verdict, str]]: ...


Settled = Callable[[RolloutGroup, Verdict | None], None]
"""Told what the hub said of a group; None: it refuses to hear of it."""


class Uploader:
    """Submits what is put into it while ``run`` runs; ``random`` draws in [0, 1), for the backoff."""

    def __init__(self, submit: Submit, *, capacity_groups: int, random: Callable[[], float]) -> None:
        self._submit = submit
        self._outbox: asyncio.Queue[RolloutGroup] = asyncio.Queue(capacity_groups)
        self._random = random

    async def put(self, group: RolloutGroup) -> None:
        """Leave a group; waits while the outbox is full."""
        await self._outbox.put(group)

    async def run(self, settled: Settled) -> None:
        """Submit until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(UPLOADS_IN_FLIGHT):
                tasks.create_task(self._submit_forever(settled))

    async def flushed(self) -> None:
        """Wait until everything put so far is settled."""
        await self._outbox.join()

    async def _submit_forever(self, settled: Settled) -> None:
        while True:
            group = await self._outbox.get()
            settled(group, await self._verdict(group))
            self._outbox.task_done()

    async def _verdict(self, group: RolloutGroup) -> Verdict | None:
        backoff = Backoff(self._random)
        while True:
            try:
                verdict, detail = await self._submit(group)
            except ConnectionLost as lost:
                logger.debug("submission lost", extra={"group_id": group.group_id, "detail": str(lost)})
            except RefusedError as refused:
                fields = {"group_id": group.group_id, "reason": refused.reason.value, "detail": str(refused)}
                if not refused.reason.is_retryable:
                    logger.warning("group refused", extra=fields)
                    return None
                logger.debug("submission put off", extra=fields)
            else:
                if detail:
                    logger.debug(
                        "group judged at once",
                        extra={"group_id": group.group_id, "verdict": verdict.value, "detail": detail},
                    )
                return verdict
            await backoff.wait()
