"""How often something is tried in a row without progress, and how long between."""

import logging

from node.errors import RefusedError
from node.rpc.channel import Backoff, ConnectionLost

logger = logging.getLogger(__name__)


class Attempts:
    """Failures in a row, at most ``limit`` of them."""

    def __init__(self, limit: int, backoff: Backoff) -> None:
        self._limit = limit
        self._backoff = backoff
        self._failed = 0

    def reset(self) -> None:
        """Note progress: what failed before does not count."""
        self._failed = 0
        self._backoff.reset()

    async def wait_after(self, error: ConnectionLost | RefusedError, *, passes: bool, at_once: bool) -> None:
        """Wait before the next attempt, unless it may be made at once.

        Raises:
            ConnectionLost, RefusedError: ``error``, if it will not pass or there were too many.
        """
        self._failed += 1
        if not passes or self._failed >= self._limit:
            raise error
        logger.debug("trying again", extra={"error": str(error), "failed": self._failed})
        if not at_once:
            await self._backoff.wait()
