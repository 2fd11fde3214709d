"""Real children: what they print, how they end, and that none is left behind."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path

import psutil
import pytest

from deploy.runs.processes import ChildError, Children
from support.waiting import until

SLEEP = ("timeit", "-n1", "-r1", "print('awake', flush=True); __import__('time').sleep(60)")
FAIL = ("timeit", "-n1", "-r1", "1/0")


def _no_children(tmp_path: Path) -> Children:
    return Children(log_of=lambda name: tmp_path / f"{name}.log", environ=dict(os.environ))


async def _for_ever() -> None:
    await asyncio.Event().wait()


def _children() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


async def test_a_command_gives_what_it_printed_or_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    async with _no_children(tmp_path) as children:
        printed = await children.run("say", "timeit", "-n1", "-r1", "print('hello')")
        assert printed.startswith("hello\n")
        with pytest.raises(ChildError, match=r"(?s)fail ended with exit code 1.*ZeroDivisionError"):
            await children.guard(children.run("fail", *FAIL))


async def test_the_death_of_a_child_ends_the_guarded_work(tmp_path: Path) -> None:
    async with asyncio.timeout(30), _no_children(tmp_path) as children:
        await children.start("fail", *FAIL, environ={})
        with pytest.raises(ChildError, match="ZeroDivisionError"):
            await children.guard(_for_ever())


@pytest.mark.parametrize("may_end", [False, True])
async def test_a_child_that_ends_well_is_a_failure_only_where_it_should_have_gone_on(
    tmp_path: Path, may_end: bool
) -> None:
    async def work(children: Children) -> str:
        await children.start("short", "timeit", "-n1", "-r1", "0", environ={}, may_end=may_end)
        assert await children.wait_for_end("short", timeout_s=20) == 0
        return "done"

    async with asyncio.timeout(30), _no_children(tmp_path) as children:
        guarded: Coroutine[None, None, str] = children.guard(work(children))
        if may_end:
            assert await guarded == "done"
        else:
            with pytest.raises(ChildError, match="exit code 0"):
                await guarded


async def test_killing_and_starting_again_is_no_failure_and_is_counted(tmp_path: Path) -> None:
    async def work(children: Children) -> None:
        for _ in range(2):
            await children.start("sleeper", *SLEEP, environ={})
            assert await children.kill("sleeper") == -signal.SIGKILL

    async with asyncio.timeout(30), _no_children(tmp_path) as children:
        await children.guard(work(children))
        assert children.starts["sleeper"] == 2


async def test_stopping_gives_the_exit_code_that_a_drain_had(tmp_path: Path) -> None:
    async with asyncio.timeout(30), _no_children(tmp_path) as children:
        await children.start("sleeper", *SLEEP, environ={})
        await until(lambda: "awake" in (tmp_path / "sleeper.log").read_text())
        assert await children.stop("sleeper") == -signal.SIGTERM


async def test_leaving_ends_every_child_also_when_cancelled(tmp_path: Path) -> None:
    others, started = _children(), asyncio.Event()

    async def demo() -> None:
        async with _no_children(tmp_path) as children:
            await children.start("one", *SLEEP, environ={})
            await children.start("two", *SLEEP, environ={})
            started.set()
            await children.guard(_for_ever())

    task = asyncio.create_task(demo())
    async with asyncio.timeout(30):
        await started.wait()
        assert len(_children() - others) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert _children() <= others


async def test_a_child_gets_its_own_environment_on_top_of_the_common_one(tmp_path: Path) -> None:
    async with asyncio.timeout(30), _no_children(tmp_path) as children:
        program = "import os; print(os.environ['DEMO_FAULT'], flush=True)"
        await children.start(
            "child", "timeit", "-n1", "-r1", program, environ={"DEMO_FAULT": "2"}, may_end=True
        )
        assert await children.wait_for_end("child", timeout_s=20) == 0
    assert (tmp_path / "child.log").read_text().startswith("2\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_that_asks_this_process_to_end_ends_its_children_first(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def work() -> None:
        async with _no_children(tmp_path) as children:
            await children.start("sleeps", *SLEEP, environ={})
            os.kill(os.getpid(), number)
            await children.guard(_for_ever())

    before = _children()
    async with asyncio.timeout(30):
        task = asyncio.create_task(work())
        await asyncio.wait({task})
    assert task.cancelled()
    assert _children() <= before
