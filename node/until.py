"""Work that goes on until the daemon stops, and waits that end."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any


async def run_until(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` until it ends or ``stopping`` is set, whichever is first; then it is cancelled.

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


async def wait_at_most(event: asyncio.Event, limit_s: float) -> None:
    """Wait until ``event`` is set, or for ``limit_s`` seconds, whichever is shorter."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
