"""Graders that do harm: none delays the sampler beyond its limit, and nothing of them is left."""

import asyncio
import itertools
import os
import secrets
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import uvloop

from node.values.groups.failure import Failure
from sampler.tasks.processes.grader_pool import GraderPool
from sampler.tasks.processes.grader_requests import TaskError
from sampler.tasks.task import TaskSetup
from support.graded_texts import grader_of, grading, texts
from support.present import present
from support.waiting import until

WALL_LIMIT_S = 2.0
LEAST_TURNS = 10
"""Fewest turns of the event loop until a limit; a machine with nothing else to do has a hundred."""
PATIENCE_S = 60.0
"""For a busy machine to start a process; nothing here waits that long elsewhere."""

MARK = "HETERORL_TEST_MARK"

HARMS: dict[str, tuple[Failure | None, dict[str, float], list[list[str]]]] = {
    "sleeping": (
        Failure.GRADING_TIMED_OUT,
        {"wall_limit_s": WALL_LIMIT_S},
        [["swallow"], ["fork_bomb"], ["daemon"], ["stop"]],
    ),
    "computing": (
        Failure.GRADING_TIMED_OUT,
        {"wall_limit_s": PATIENCE_S, "cpu_limit_s": 1},
        [["regex"]],
    ),
    "failing": (
        Failure.GRADING_FAILED,
        {"wall_limit_s": PATIENCE_S},
        [["memory", "exit", "close", "daemon_and_exit", "message", "recursion", "patch", "answer"]],
    ),
    "doing more": (
        None,
        {"wall_limit_s": PATIENCE_S},
        [["output", "orphans", "fork_and_return"], ["threads"]],
    ),
}
"""Fault of the group, limits of the graders, and the harms of each grader in their turn."""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark every process that a grader starts; kill what is left all the same."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    yield mark
    while left := [process for process in marked(mark) if process.pid != os.getpid()]:
        for process in left:
            process.kill()


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that carry the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return found


async def turns_until(stop: asyncio.Event) -> int:
    """Count the turns of the event loop, a hundred a second at most."""
    turns = 0
    while not stop.is_set():
        await asyncio.sleep(0.01)
        turns += 1
    return turns


@pytest.mark.parametrize("kind", HARMS)
def test_a_hostile_grader_costs_its_group_only_and_leaves_nothing(kind: str, mark: str) -> None:
    # The daemon runs on uvloop, whose processes are not asyncio's.
    uvloop.run(cost_their_groups_only(mark, *HARMS[kind]))


async def cost_their_groups_only(
    mark: str, fault: Failure | None, limits: dict[str, float], harms: list[list[str]]
) -> None:
    others = set(psutil.Process().children(recursive=True))
    setup = TaskSetup("support.hostile_tasks:Hostile", {}, environment=[MARK])
    pools = [GraderPool(lambda: grader_of(setup, **limits), most=1) for _ in harms]
    try:
        for turn in itertools.zip_longest(*harms):
            side_by_side = [
                grade_with(pool, harm, fault) for pool, harm in zip(pools, turn, strict=True) if harm
            ]
            outcomes = await asyncio.gather(*side_by_side, return_exceptions=True)
            failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            if failures:
                raise ExceptionGroup(f"{turn}", failures)
            mine = set(psutil.Process().children(recursive=True)) - others
            assert len(mine) <= 3 * len(pools), f"what {turn} started is gone before the next group"
            # A child that the grader did not wait for is its own.
            is_reaped = all(one.status() != psutil.STATUS_ZOMBIE for one in mine)
            assert is_reaped or "fork_and_return" in turn, f"orphans of {turn} are reaped before the next"
    finally:  # also where an assertion fails: uvloop does not close while a process of its own lives
        await asyncio.gather(*(pool.close() for pool in pools))
    await until(lambda: not marked(mark))


async def grade_with(pool: GraderPool, harm: str, fault: Failure | None) -> None:
    await pool.start()
    prompt = await pool.prompt(1)
    stop = asyncio.Event()
    watching = asyncio.create_task(turns_until(stop))
    began = time.monotonic()
    if fault is None:
        assert (await pool.grade(prompt, texts(harm))).rewards == [1.0]
    else:
        with pytest.raises(TaskError) as error:
            await pool.grade(prompt, texts(harm))
        assert error.value.fault is fault, harm
        assert time.monotonic() - began < WALL_LIMIT_S + PATIENCE_S
    stop.set()
    turns = await watching
    if fault is Failure.GRADING_TIMED_OUT:
        assert turns > LEAST_TURNS, "heartbeats would have waited for the grader's limit"
    assert (await pool.grade(await pool.prompt(2), texts("x", "y"))).rewards == [1.0, 1.0]


def test_a_grader_that_ends_between_two_groups_costs_none() -> None:
    """As when the kernel needs memory: a write to it is no OSError under uvloop."""

    async def leave() -> None:
        killed: list[None] = []
        async with grading("support.hostile_tasks:Leaving", killed=lambda: killed.append(None)) as grader:
            assert (await grader.grade(1, texts("x"))).rewards == [1.0]
            process = present(grader.process._process)
            assert process.stdin is not None
            await until(process.stdin.is_closing)
            assert (await grader.grade(1, texts("x", "y"))).rewards == [1.0, 1.0]
            assert len(killed) == 1

    uvloop.run(leave())


GRADING = """
import asyncio
from sampler.tasks.task import TaskSetup
from sampler.tasks.processes.grader_pool import GraderPool
from support.graded_texts import grader_of, prompt_of, texts

async def main():
    setup = TaskSetup("support.hostile_tasks:Hostile", {}, environment=["HETERORL_TEST_MARK"])
    pool = GraderPool(lambda: grader_of(setup, wall_limit_s=600, cpu_limit_s=600), most=1)
    await pool.start()
    print("ready", flush=True)
    await pool.grade(prompt_of(1), texts("swallow"))

asyncio.run(main())
"""


async def test_a_grader_ends_with_a_sampler_that_is_killed(mark: str) -> None:
    sampler = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        GRADING,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert sampler.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await sampler.stdout.readline() == b"ready\n"
    assert len(marked(mark)) == 3
    sampler.kill()
    await sampler.wait()
    await until(lambda: not marked(mark))
