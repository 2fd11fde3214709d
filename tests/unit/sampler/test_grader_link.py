"""A task whose process somebody else starts for each connection, as systemd does."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from sampler.tasks.processes.grader_link import check_socket
from sampler.tasks.processes.grader_process import environment
from sampler.tasks.processes.grader_requests import TaskError
from sampler.tasks.task import TaskSetup
from support.graded_texts import grading, setup_of, texts
from support.refusals import cannot_start, naming

ROW = '{"prompt": "Square.", "tests": ["assert f(2) == 4"]}'


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Start a worker for each connection; yield those there were, which all have ended in the end."""
    workers: list[asyncio.subprocess.Process] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)

        async def accept() -> None:
            while True:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                connection.setblocking(True)
                with connection:
                    workers.append(
                        await asyncio.create_subprocess_exec(
                            sys.executable,
                            "-m",
                            "sampler.tasks.processes.grader_worker",
                            stdin=connection.fileno(),
                            env={**environment(()), "MARK": str(path)},
                            stdout=connection.fileno(),
                        )
                    )

        accepting = asyncio.create_task(accept())
        try:
            yield workers
        finally:
            accepting.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(*(worker.wait() for worker in workers))


def setup(path: Path) -> TaskSetup:
    """Return a code task that is graded at the socket."""
    options = {"grader": "code", "code": {"time_limit_s": 20}, "answer": "tests"}
    with socket.socket(socket.AF_UNIX) as nobody:  # for the check at the start
        nobody.bind(str(path))
        nobody.listen()
        made = setup_of("jsonl", options, run_code=True, grader_wall_limit_s=3600, programs_socket=path)
    path.unlink()
    return made


@pytest.mark.needs("bwrap", "libseccomp")
async def test_programs_are_graded_where_the_socket_leads(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    task = setup(path)
    async with served(path) as workers, grading(task, wall_limit_s=60, memory_limit_bytes=2 << 30) as grader:
        for _ in range(2):
            grades = await grader.grade(0, texts("def f(x): return x * x", "1 / 0"), row=ROW)
            assert grades.rewards == [1.0, 0.0]
        (worker,) = workers
        assert worker.returncode is None


async def test_a_grader_that_hangs_ends_with_its_connection_and_all_it_started(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    hanging = TaskSetup("support.hostile_tasks:Hostile", {}, served_at=str(path))
    async with served(path) as workers, grading(hanging, wall_limit_s=2) as grader:
        with naming(TaskError, "2 s"):
            await grader.grade(1, texts("daemon"))
        async with asyncio.timeout(60):
            await workers[0].wait()
        assert not [each for each in psutil.process_iter(["environ"]) if is_of(each, path)]


def is_of(process: psutil.Process, path: Path) -> bool:
    """Whether the test marked with ``path`` started a process that still runs."""
    is_running = process.status() != psutil.STATUS_ZOMBIE
    return is_running and (process.info["environ"] or {}).get("MARK") == str(path)


async def test_a_socket_without_a_unit_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with cannot_start("systemctl enable --now heterorl-programs"):
        check_socket(tmp_path / "socket")
