"""Graders that do harm: none delays the sampler beyond its limit, and nothing of them is left."""

import asyncio
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
"""Fewest turns of the event loop within that limit; a machine with nothing else to do has two hundred."""
PATIENCE_S = 60.0
"""For a busy machine to start a process; nothing here waits that long elsewhere."""

MARK = "HETERORL_TEST_MARK"

HARMS = {
    "loop": Failure.GRADING_TIMED_OUT,
    "swallow": Failure.GRADING_TIMED_OUT,
    "fork_bomb": Failure.GRADING_TIMED_OUT,
    "daemon": Failure.GRADING_TIMED_OUT,
    "memory": Failure.GRADING_FAILED,
    "exit": Failure.GRADING_FAILED,
    "close": Failure.GRADING_FAILED,
    "regex": Failure.GRADING_TIMED_OUT,
    "daemon_and_exit": Failure.GRADING_FAILED,
    "stop": Failure.GRADING_TIMED_OUT,
    "message": Failure.GRADING_FAILED,
    "recursion": Failure.GRADING_FAILED,
    "patch": Failure.GRADING_FAILED,
    "answer": Failure.GRADING_FAILED,
    "output": None,
    "fork_and_return": None,
    "orphans": None,
    "threads": None,
}


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark every process that a grader starts; kill what is left all the same."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    yield mark
    while left := [process for process in marked(mark) if process.pid != os.getpid()]:
        for process in left:
            process.kill()


def make_pool(harm: str) -> GraderPool:
    setup = TaskSetup("support.hostile_tasks:Hostile", {"harm": harm}, environment=[MARK])
    wall_limit_s = WALL_LIMIT_S if HARMS[harm] is Failure.GRADING_TIMED_OUT else PATIENCE_S
    return GraderPool(lambda: grader_of(setup, wall_limit_s=wall_limit_s), most=2)


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


SLEEPING = ["swallow", "fork_bomb", "daemon", "stop"]
COMPUTING = ["loop", "regex"]
OTHERS = [harm for harm in HARMS if harm not in SLEEPING + COMPUTING]


@pytest.mark.parametrize(
    "harms",
    [SLEEPING, COMPUTING, *([harm] for harm in OTHERS)],
    ids="-".join,
)
def test_a_hostile_grader_costs_its_group_only_and_leaves_nothing(harms: list[str], mark: str) -> None:
    # The daemon runs on uvloop, whose processes are not asyncio's.
    uvloop.run(cost_their_groups_only(harms, mark))


async def cost_their_groups_only(harms: list[str], mark: str) -> None:
    """Run each harm as a sampler of its own, so that all wait for the limit side by side."""
    others = set(psutil.Process().children(recursive=True))
    pools = {harm: make_pool(harm) for harm in harms}
    try:
        outcomes = await asyncio.gather(*map(grade_with, pools.values(), harms), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failures:
            raise ExceptionGroup(", ".join(harms), failures)
        mine = set(psutil.Process().children(recursive=True)) - others
        assert len(mine) <= 4 * len(harms), "what the graders started is gone before the next group"
        # A child that the grader did not wait for is its own.
        is_reaped = all(one.status() != psutil.STATUS_ZOMBIE for one in mine)
        assert harms == ["fork_and_return"] or is_reaped, "orphans are reaped before the next group"
    finally:  # also where an assertion fails: uvloop does not close while a process of its own lives
        await asyncio.gather(*(pool.close() for pool in pools.values()))
    await until(lambda: not marked(mark))


async def grade_with(pool: GraderPool, harm: str) -> None:
    await pool.start()
    prompt = await pool.prompt(1)
    stop = asyncio.Event()
    watching = asyncio.create_task(turns_until(stop))
    began = time.monotonic()
    fault = HARMS[harm]
    if fault is None:
        assert (await pool.grade(prompt, texts("x"))).rewards == [1.0]
    else:
        with pytest.raises(TaskError) as error:
            await pool.grade(prompt, texts("x"))
        assert error.value.fault is fault
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
    setup = TaskSetup(
        "support.hostile_tasks:Hostile", {"harm": "swallow"}, environment=["HETERORL_TEST_MARK"]
    )
    pool = GraderPool(lambda: grader_of(setup, wall_limit_s=600, cpu_limit_s=600), most=1)
    await pool.start()
    print("ready", flush=True)
    await pool.grade(prompt_of(1), texts("x"))

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
