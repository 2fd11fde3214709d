import asyncio

import pytest

from node.waits import run_until


async def test_work_that_ends_by_itself_ends_the_wait() -> None:
    async def work() -> None:
        pass

    await asyncio.wait_for(run_until(asyncio.Event(), work()), timeout=5)


async def test_stopping_cancels_the_work_and_waits_for_its_clean_up() -> None:
    stopping, cleaned = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        stopping.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    await asyncio.wait_for(run_until(stopping, work()), timeout=5)
    assert cleaned.is_set()


async def test_what_the_work_raises_is_raised() -> None:
    async def work() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await run_until(asyncio.Event(), work())


async def test_a_cancelled_caller_cancels_the_work() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    caller = asyncio.create_task(run_until(asyncio.Event(), work()))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
