"""Free space on the file system of the state directory, as metrics."""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.system.waits import wait_at_most
from node.telemetry.metrics import NodeMetrics

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 15.0
"""A disk that fills at 1 GB/s loses 15 GB between two looks."""


class DiskWatch:
    """A service that measures the free space every ``LOOK_EVERY_S``."""

    name = "disk watch"

    def __init__(self, directory: Path, *, metrics: NodeMetrics) -> None:
        """Watch ``directory``, or the folder it will be made in until it exists."""
        self._directory = directory
        self._metrics = metrics

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Measure until ``stopping``."""
        await self._look()
        ready()
        while not stopping.is_set():
            await wait_at_most(stopping, LOOK_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        try:
            # In a thread: a network file system whose server is gone does not answer.
            usage = await asyncio.to_thread(_usage, self._directory)
        except OSError as error:
            logger.warning(
                "free disk not known", extra={"path": str(self._directory), "error": error.strerror}
            )
            return
        self._metrics.show_disk(free_bytes=usage.free, size_bytes=usage.total)


def _usage(directory: Path) -> "shutil._ntuple_diskusage":
    for folder in (directory.absolute(), *directory.absolute().parents):
        with contextlib.suppress(FileNotFoundError):
            return shutil.disk_usage(folder)
    raise FileNotFoundError(2, "no folder above it is there", str(directory))
