"""A run of real processes over mutual TLS, each of them killed without warning in mid-work."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

from deploy.demo.plan import NEAR, Plan
from deploy.demo.session import Session
from deploy.runs.processes import Children
from deploy.runs.promises import promises_of_any_run
from deploy.runs.records import Step, read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, RunDirectory
from support.waiting import until

VERSIONS = 40
KILLS = ((NEAR, 6), (LEARNER, 12), (COORDINATOR, 20), (LEARNER, 28))
"""Who is killed once the run has come how far."""


def steps_of(directory: RunDirectory) -> list[Step]:
    if not directory.step_log.exists():
        return []
    # A line that is being written has no end yet.
    return [
        Step.parse(line)
        for line in directory.step_log.read_text().splitlines(keepends=True)
        if line[-1] == "\n"
    ]


async def status_line(session: Session, directory: RunDirectory, label: str) -> str:
    """Return the line of ``heterorl-node status`` that begins with ``label``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node", "status", "--state-dir", str(directory.coordinator_state)),
        *("--coordinator", f"127.0.0.1:{session.ports.members}"),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    (line,) = [line for line in out.decode().splitlines() if line.startswith(label)]
    return line


@pytest.mark.timeout(240)
async def test_whatever_is_killed_versions_go_on_and_no_group_is_lost_or_trained_on_twice(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    async with Children(log_of=directory.log, environ=environ) as children:
        session = Session(Plan(seed=0, versions=VERSIONS, has_chaos=False), directory, children=children)
        await session.begin()
        for name, version in KILLS:
            await until(lambda version=version: len(steps_of(directory)) >= version, within_s=60)  # type: ignore[misc]
            await session.kill(name)
            await session.start(name, environ={})
        assert await session.wait_for_last_step(timeout_s=60)
        said = await status_line(session, directory, "staleness")
        exit_codes = await session.drain()
    promises = promises_of_any_run(
        versions=VERSIONS,
        steps=steps_of(directory),
        ledger=read_ledger(directory.ledger, run_id=directory.run_id),
        exit_codes=exit_codes,
    )
    broken = [f"{c.promise}: {c.figures}" for c in promises if not c.is_kept]
    assert broken == []
    # From what the learner has measured since it was last started.
    assert re.match(r"staleness beyond lag \d+ the effective sample size of token weights may halve", said)
    assert "(bound is 32 versions)" in said
    epoch = await asyncio.to_thread((directory.state(LEARNER) / LEARNER / "epoch").read_text)
    assert json.loads(epoch) == 3
