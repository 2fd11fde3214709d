"""A thread that does blocking work, one piece after the other, for the event loop's thread.

A write that a full disk refuses is repeated in it until there is room, or until the learner is to stop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from learner.disk_wait import DiskWait

Answer = TypeVar("Answer")


class WorkThread:
    """A thread by its name; it begins with its first work."""

    def __init__(self, name: str, disk_wait: DiskWait, *, stopping: asyncio.Event) -> None:
        """Wait for a full disk until ``stopping``."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._disk_wait = disk_wait
        self._stopping = stopping

    async def do(self, work: Callable[[], Answer]) -> Answer:
        """Return what ``work`` returns, once all that was asked for before is done."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def until_written(self, what: str, write: Callable[[], Answer]) -> Answer | None:
        """Do ``write`` until the disk takes it; None if the learner is stopped before. As ``DiskWait``."""
        return await self._disk_wait.until_written(what, lambda: self.do(write), stopping=self._stopping)

    def close(self) -> None:
        """Do nothing that has not begun; what has begun is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)
