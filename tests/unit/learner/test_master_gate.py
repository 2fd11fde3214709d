"""Who may touch the masters when; the publisher's side on the event loop, the optimizer's in a thread."""

import asyncio
import contextlib

import pytest

from learner.training.master_access import MasterAccess
from support.clock import ManualClock


@pytest.fixture
def gate() -> MasterAccess:
    return MasterAccess(version=3, monotonic=ManualClock().monotonic)


async def test_what_was_published_already_is_not_read(gate: MasterAccess) -> None:
    gate.hold(3)
    assert gate.take() is None
    gate.begin_writing()
    assert gate.take_superseded() == 0


async def test_a_version_is_read_once(gate: MasterAccess) -> None:
    gate.hold(4)
    assert gate.take() == 4
    gate.release()
    gate.hold(4)
    assert gate.take() is None


async def test_a_version_nobody_has_begun_to_read_gives_way_to_the_next(gate: MasterAccess) -> None:
    for version in (4, 5, 6):
        gate.hold(version)
        gate.begin_writing()
    assert not gate.has_unread
    assert (gate.take(), gate.take_superseded(), gate.take_superseded()) == (None, 3, 0)


async def test_a_version_given_up_for_a_step_that_was_not_taken_can_be_read_after_all(
    gate: MasterAccess,
) -> None:
    gate.hold(4)
    gate.begin_writing()
    gate.hold(4)
    assert gate.take() == 4


async def test_the_optimizer_waits_for_a_reading_that_has_begun(gate: MasterAccess) -> None:
    gate.hold(4)
    assert gate.take() == 4
    writing = asyncio.create_task(asyncio.to_thread(gate.begin_writing))
    done, _ = await asyncio.wait({writing}, timeout=0.05)
    assert not done
    gate.release()
    await asyncio.wait_for(writing, timeout=10)


async def test_an_idle_publisher_misses_no_version_however_fast_the_next_step_is(gate: MasterAccess) -> None:
    waiting = asyncio.create_task(gate.wait_for_version())
    await asyncio.sleep(0)
    gate.hold(4)
    writing = asyncio.create_task(asyncio.to_thread(gate.begin_writing))
    await waiting
    done, _ = await asyncio.wait({writing}, timeout=0.05)
    assert not done
    assert gate.take() == 4
    gate.release()
    await asyncio.wait_for(writing, timeout=10)


async def test_a_publisher_that_ends_between_promise_and_reading_holds_nobody_up(gate: MasterAccess) -> None:
    waiting = asyncio.create_task(gate.wait_for_version())
    await asyncio.sleep(0)
    gate.hold(4)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    gate.give_up()
    await asyncio.wait_for(asyncio.to_thread(gate.begin_writing), timeout=10)


async def test_giving_up_does_not_end_a_reading_that_is_under_way(gate: MasterAccess) -> None:
    gate.hold(4)
    assert gate.take() == 4
    gate.give_up()
    writing = asyncio.create_task(asyncio.to_thread(gate.begin_writing))
    done, _ = await asyncio.wait({writing}, timeout=0.05)
    assert not done
    gate.release()
    await asyncio.wait_for(writing, timeout=10)


async def test_what_is_held_already_is_not_waited_for(gate: MasterAccess) -> None:
    gate.hold(4)
    await asyncio.wait_for(gate.wait_for_version(), timeout=10)
    assert gate.take() == 4


async def test_a_version_put_back_is_read_once_more(gate: MasterAccess) -> None:
    gate.hold(4)
    assert gate.take() == 4
    gate.release()
    gate.put_back()
    assert gate.has_unread
    assert (gate.take(), gate.take()) == (4, None)


@pytest.mark.parametrize("is_written", [False, True], ids=["being written", "written"])
async def test_a_version_put_back_too_late_is_left_to_the_next(gate: MasterAccess, is_written: bool) -> None:
    gate.hold(4)
    assert gate.take() == 4
    gate.release()
    gate.begin_writing()
    if is_written:
        gate.hold(5)
    gate.put_back()
    assert gate.take() == (5 if is_written else None)


async def test_a_version_put_back_gives_way_to_the_next(gate: MasterAccess) -> None:
    gate.hold(4)
    gate.take()
    gate.release()
    gate.put_back()
    await asyncio.wait_for(asyncio.to_thread(gate.begin_writing), timeout=10)
    assert (gate.take(), gate.take_superseded()) == (None, 1)
