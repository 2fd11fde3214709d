"""Waits that end: for work or a stop, for an event or a time limit."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any


async def run_until(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` until it ends or ``stopping`` is set, which cancels it.

    Returns when ``work`` has cleaned up; raises what it raised.
    """
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def wait_at_most(event: asyncio.Event, limit_s: float | None) -> None:
    """Wait until ``event`` is set, at most ``limit_s`` seconds; None sets no limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
