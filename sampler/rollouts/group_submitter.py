"""Submits finished groups to the hub until it answers; the hub answers a repeat with ``duplicate``.

put --> queue, bounded --> submit --verdict--> settled
                             |  ^
                             |  `-- connection lost, hub busy or restarting: backoff
                             `-- a final refusal: settled without a verdict
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from node.errors import RefusedError
from node.rollout import EncodedGroup
from node.rpc.channel import Backoff, ConnectionLost
from node.verdict import Verdict

logger = logging.getLogger(__name__)

SUBMISSIONS_IN_FLIGHT: Final = 32
"""A hundred a second at a hub 300 ms away; their bytes are bounded by the stream they go over."""

Submit = Callable[[EncodedGroup], Awaitable[tuple[Verdict, str]]]
"""``SamplerRolloutClient.submit``."""

Settled = Callable[[str, Verdict | None], None]
"""Called with a group's id and the hub's verdict on it; None: the hub refused it for good."""


class GroupSubmitter:
    """Submits the groups put into it while ``run`` runs: the same bytes each time.

    ``random`` draws in [0, 1), for the backoff.
    """

    def __init__(self, submit: Submit, *, capacity_groups: int, random: Callable[[], float]) -> None:
        self._submit = submit
        self._queue: asyncio.Queue[EncodedGroup] = asyncio.Queue(capacity_groups)
        self._random = random

    async def put(self, group: EncodedGroup) -> None:
        """Queue a group; wait while the queue is full."""
        await self._queue.put(group)

    async def run(self, settled: Settled) -> None:
        """Submit until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SUBMISSIONS_IN_FLIGHT):
                tasks.create_task(self._submit_forever(settled))

    async def flushed(self) -> None:
        """Wait until every group put so far is settled."""
        await self._queue.join()

    async def _submit_forever(self, settled: Settled) -> None:
        while True:
            group = await self._queue.get()
            settled(group.group_id, await self._verdict(group))
            self._queue.task_done()

    async def _verdict(self, group: EncodedGroup) -> Verdict | None:
        backoff = Backoff(self._random)
        while True:
            try:
                verdict, _ = await self._submit(group)
                return verdict
            except (ConnectionLost, RefusedError) as error:
                fields = {"group_id": group.group_id, "detail": str(error)}
                if isinstance(error, RefusedError) and not error.reason.is_retryable:
                    logger.warning("group refused", extra={**fields, "reason": error.reason.value})
                    return None
                logger.debug("submission put off", extra=fields)
            await backoff.wait()
