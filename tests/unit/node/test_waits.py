import asyncio

import pytest

from node.system.waits import run_until, side_by_side, while_it_may
from support.present import present


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


@pytest.mark.parametrize("fails_at_once", [True, False])
async def test_the_first_failure_side_by_side_is_raised_as_it_is_and_leaves_no_cancellation(
    fails_at_once: bool,
) -> None:
    cancelled = asyncio.Event()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def both() -> None:
        async with side_by_side() as group:
            group.create_task(wait())
            group.create_task(fail())
            if not fails_at_once:
                await asyncio.sleep(0.01)

    with pytest.raises(ValueError, match="first"):
        await both()
    assert cancelled.is_set()
    assert present(asyncio.current_task()).cancelling() == 0
    with pytest.raises(TimeoutError):  # as before Python 3.11.3, it would be CancelledError
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()


async def test_work_goes_on_while_it_may_and_is_cleaned_up_before_its_end_is_told() -> None:
    changed, asked, cleaned = asyncio.Event(), 0, False

    async def may_go_on() -> bool:
        nonlocal asked
        asked += 1
        changed.set()
        return asked < 3

    async def work() -> str:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned = True
        return "never"

    changed.set()
    assert await while_it_may(work(), changed=changed, may_go_on=may_go_on) is None
    assert (asked, cleaned) == (3, True)


@pytest.mark.parametrize("error", [None, LookupError("gone")])
async def test_what_work_returns_or_raises_is_told_without_asking_whether_it_may_go_on(
    error: Exception | None,
) -> None:
    async def never() -> bool:
        raise AssertionError

    async def work() -> str:
        if error is not None:
            raise error
        return "done"

    doing = while_it_may(work(), changed=asyncio.Event(), may_go_on=never)
    if error is None:
        assert await doing == "done"
    else:
        with pytest.raises(LookupError):
            await doing
