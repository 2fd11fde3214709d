"""Submits finished groups to the hub until it answers; the hub answers a repeat with ``duplicate``.

waits for a place --> submitted --> verdict
                        |  ^
                        |  `-- connection lost, hub busy or restarting: backoff
                        `-- a final refusal: no verdict

How many groups wait is bounded where they are leased, see ``WorkQueue``.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import Backoff
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import Verdict

logger = logging.getLogger(__name__)

SUBMISSIONS_IN_FLIGHT: Final = 64
"""Two hundred a second at a hub 300 ms away. With half as many, a hub of few samplers has all their groups in
one commit, and nothing to read meanwhile. Their bytes are bounded by the stream they go over."""

Submit = Callable[[EncodedGroup], Awaitable[tuple[Verdict, str]]]
"""``SamplerRolloutClient.submit``."""


class GroupSubmitter:
    """Submits groups, ``SUBMISSIONS_IN_FLIGHT`` at once; ``random`` draws in [0, 1), for the backoff."""

    def __init__(self, submit: Submit, *, random: Callable[[], float]) -> None:
        self._submit = submit
        self._random = random
        self._places = asyncio.Semaphore(SUBMISSIONS_IN_FLIGHT)

    async def verdict(self, group: EncodedGroup) -> Verdict | None:
        """Submit the same bytes until the hub answers; return its verdict, None if it refuses for good."""
        async with self._places:
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
