"""Work that goes on until the daemon stops."""

import asyncio
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
