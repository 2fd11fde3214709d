"""Waits that end: for work or a stop, for an event or a time limit; and the end of tasks that one owns."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_until(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` until it ends or ``stopping`` is set, which cancels it.

    Returns when ``work`` has cleaned up; raises what it raised.
    """
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await put_away(task, stopped)
    if not task.cancelled():
        task.result()


async def put_away(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, wait until they have ended, and look at what they raised, which their owner lets be.

    A task that ends with an exception which nobody has looked at is logged by asyncio with a traceback.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def drop(task: asyncio.Future[Any]) -> None:
    """Do the same where nobody can wait for the end."""
    task.cancel()
    task.add_done_callback(_look_at)


def _look_at(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def while_it_may(
    work: Coroutine[Any, Any, T], *, changed: asyncio.Event, may_go_on: Callable[[], Awaitable[bool]]
) -> T | None:
    """Return what ``work`` returns; None: it may not go on, and was cancelled.

    ``may_go_on`` is asked at each change, which sets ``changed`` (cleared here).
    """
    task = asyncio.create_task(work)
    try:
        while not task.done():
            change = asyncio.create_task(changed.wait())
            await asyncio.wait({task, change}, return_when=asyncio.FIRST_COMPLETED)
            change.cancel()
            changed.clear()
            if not (task.done() or await may_go_on()):
                return None
    finally:
        await put_away(task)
    return task.result()


async def wait_at_most(event: asyncio.Event, limit_s: float | None) -> None:
    """Wait until ``event`` is set, at most ``limit_s`` seconds; None sets no limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()


@contextlib.asynccontextmanager
async def side_by_side() -> AsyncIterator[asyncio.TaskGroup]:
    """Yield a task group; raise the first failure of its tasks, which cancels the others, as it is.

    A TaskGroup with a failure cancels the task around it, and may leave that counted. Until Python 3.11.3,
    so with Debian 12's 3.11.2, the next ``asyncio.timeout`` of that task then ends as cancelled.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        if task.cancelling() > before:
            task.uncancel()
        raise failures.exceptions[0] from None
