"""Waiting for a full disk: a write that it refused is tried again until there is room.

    write --taken--> done
      ^  '--disk full, failing or read-only--> "disk" (gauge, warning, refusal counted) --backoff--.
      '------------------------------------------------------------------------------------------'

Nobody hears of the write before it is done. A stop ends the wait after one more try.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Final, TypeVar

from node.errors import Reason, RefusedError
from node.system import durable
from node.system.backoff import Backoff
from node.system.clock import Clock
from node.telemetry.metrics import NodeMetrics

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S: Final = 5.0
"""Between two tries: training goes on within seconds of there being room, and a large checkpoint that does
not fit does not keep the disk busy all the time."""

Written = TypeVar("Written")


class DiskWait:
    """Repeats writes until the disk takes them; each call is a wait of its own."""

    def __init__(self, *, node_metrics: NodeMetrics, clock: Clock, random: Callable[[], float]) -> None:
        """Show waits in ``node_metrics``; ``random`` draws in [0, 1), for the backoff."""
        self._node_metrics = node_metrics
        self._clock = clock
        self._random = random

    async def until_written(
        self, what: str, write: Callable[[], Awaitable[Written]], *, stopping: asyncio.Event
    ) -> Written | None:
        """Call ``write`` until the disk takes it and return its result; None if ``stopping`` came first.

        Args:
            what: for the log: "the checkpoint of version 7".
            write: must leave nothing behind where it fails.
        Raises:
            OSError: it failed for a reason that room on the disk does not change.
        """
        backoff = Backoff(self._random, cap_s=LONGEST_PAUSE_S)
        since_s = self._clock.monotonic()
        with ExitStack() as wait:
            while True:
                is_last = stopping.is_set()
                try:
                    written = await write()
                except (OSError, RefusedError) as error:
                    if not _is_disk(error):
                        raise
                    detail = str(error)
                    fix = durable.disk_fix(error, disk="the disk of the state directory")
                else:
                    if backoff.retries:
                        waited_s = round(self._clock.monotonic() - since_s, 3)
                        logger.info("disk takes writes again", extra={"what": what, "waited_s": waited_s})
                    return written
                if not backoff.retries:
                    wait.enter_context(self._node_metrics.waiting("disk"))
                self._node_metrics.count_refusal(service="Learner", reason=Reason.DISK)
                fields = {"what": what, "tries": backoff.retries + 1, "detail": detail}
                if is_last:
                    logger.warning("stopped before the disk took it", extra=fields)
                    return None
                logger.warning(
                    "disk takes no writes",
                    extra={**fields, "fix": fix},
                )
                await backoff.wait(stopping)


def _is_disk(error: OSError | RefusedError) -> bool:
    if isinstance(error, RefusedError):
        return error.reason is Reason.DISK
    return error.errno in durable.DISK_ERRORS
