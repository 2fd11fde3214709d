"""Who may touch the masters when; the publisher's side on the event loop, the optimizer's in a thread."""

import asyncio
import contextlib

import pytest

from learner.masters.master_access import MasterAccess
from support.clock import ManualClock


@pytest.fixture
def access() -> MasterAccess:
    return MasterAccess(version=3, monotonic=ManualClock().monotonic)


async def test_a_published_version_is_not_read_again(access: MasterAccess) -> None:
    access.hold(3)
    assert access.take() is None
    access.begin_writing()
    assert access.take_superseded() == 0


async def test_a_version_is_read_once(access: MasterAccess) -> None:
    access.hold(4)
    assert access.take() == 4
    access.release()
    access.hold(4)
    assert access.take() is None


async def test_a_version_nobody_has_begun_to_read_gives_way_to_the_next(access: MasterAccess) -> None:
    for version in (4, 5, 6):
        access.hold(version)
        access.begin_writing()
    assert not access.has_unread
    assert (access.take(), access.take_superseded(), access.take_superseded()) == (None, 3, 0)


async def test_a_version_given_up_for_a_step_that_was_not_taken_can_be_read_after_all(
    access: MasterAccess,
) -> None:
    access.hold(4)
    access.begin_writing()
    access.hold(4)
    assert access.take() == 4


async def held_up(access: MasterAccess) -> asyncio.Task[float]:
    """Return a writing that waits."""
    writing = asyncio.create_task(asyncio.to_thread(access.begin_writing))
    done, _ = await asyncio.wait({writing}, timeout=0.05)
    assert not done
    return writing


@pytest.mark.parametrize("gives_up", [False, True])
async def test_the_optimizer_waits_for_a_reading_that_has_begun(access: MasterAccess, gives_up: bool) -> None:
    access.hold(4)
    assert access.take() == 4
    if gives_up:
        access.give_up()
    writing = await held_up(access)
    access.release()
    await asyncio.wait_for(writing, timeout=10)


async def test_an_idle_publisher_misses_no_version_however_fast_the_next_step_is(
    access: MasterAccess,
) -> None:
    waiting = asyncio.create_task(access.wait_for_version())
    await asyncio.sleep(0)
    access.hold(4)
    writing = await held_up(access)
    await waiting
    assert access.take() == 4
    access.release()
    await asyncio.wait_for(writing, timeout=10)


async def test_a_publisher_that_ends_between_promise_and_reading_holds_nobody_up(
    access: MasterAccess,
) -> None:
    waiting = asyncio.create_task(access.wait_for_version())
    await asyncio.sleep(0)
    access.hold(4)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    access.give_up()
    await asyncio.wait_for(asyncio.to_thread(access.begin_writing), timeout=10)


async def test_a_version_that_is_held_is_not_waited_for(access: MasterAccess) -> None:
    access.hold(4)
    await asyncio.wait_for(access.wait_for_version(), timeout=10)
    assert access.take() == 4


async def test_a_version_put_back_is_read_once_more(access: MasterAccess) -> None:
    access.hold(4)
    assert access.take() == 4
    access.release()
    access.put_back()
    assert access.has_unread
    assert (access.take(), access.take()) == (4, None)


@pytest.mark.parametrize("is_written", [False, True], ids=["being written", "written"])
async def test_a_version_put_back_too_late_is_left_to_the_next(
    access: MasterAccess, is_written: bool
) -> None:
    access.hold(4)
    assert access.take() == 4
    access.release()
    access.begin_writing()
    if is_written:
        access.hold(5)
    access.put_back()
    assert access.take() == (5 if is_written else None)


async def test_a_version_put_back_gives_way_to_the_next(access: MasterAccess) -> None:
    access.hold(4)
    access.take()
    access.release()
    access.put_back()
    await asyncio.wait_for(asyncio.to_thread(access.begin_writing), timeout=10)
    assert (access.take(), access.take_superseded()) == (None, 1)
