"""A run of real processes that evaluates while its coordinator is killed with prompts half answered."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.demo.plan import NEAR, Plan
from deploy.demo.session import Session
from deploy.runs.processes import Children
from deploy.runs.promises import promises_of_any_run
from deploy.runs.records import StepTail, read_ledger
from deploy.runs.run_directory import COORDINATOR, RunDirectory
from node.commands.cli import main
from node.coordinator.ledger.evaluation_record import read_evaluations
from node.errors import StartupError
from support.waiting import until

VERSIONS = 30
EVERY_VERSIONS = 10
PROMPTS = 12


class EvaluatedSession(Session):
    """A session whose coordinator evaluates."""

    async def start(self, name: str, *, environ: Mapping[str, str]) -> None:
        evaluation = json.dumps({"every_versions": EVERY_VERSIONS, "prompts": PROMPTS})
        ours = {"HETERORL_COORDINATOR__EVALUATION": evaluation} if name == COORDINATOR else {}
        await super().start(name, environ={**environ, **ours})


@pytest.mark.timeout(240)
async def test_each_held_out_prompt_counts_once_whenever_the_coordinator_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def is_half_done(version: int) -> bool:
        try:
            evaluations = read_evaluations(directory.ledger)
        except StartupError:  # it restarts
            return False
        return any(one.version >= version and one.counted_prompts for one in evaluations)

    async with Children(log_of=directory.log, environ=environ) as children:
        session = EvaluatedSession(
            Plan(seed=0, versions=VERSIONS, has_chaos=False), directory, children=children
        )
        await session.begin()
        for name, version in ((COORDINATOR, 0), (NEAR, EVERY_VERSIONS), (COORDINATOR, 2 * EVERY_VERSIONS)):
            await until(lambda version=version: is_half_done(version), within_s=60)  # type: ignore[misc]
            await session.kill(name)
            await session.start(name, environ={})
        assert await session.wait_for_last_step(timeout_s=60)
        exit_codes = await session.drain()
    ledger = read_ledger(directory.ledger, run_id=directory.run_id)
    promises = promises_of_any_run(
        versions=VERSIONS, steps=StepTail(directory.step_log).read(), ledger=ledger, exit_codes=exit_codes
    )
    assert [c.figures for c in promises if not c.is_kept] == []
    finished = [one for one in read_evaluations(directory.ledger) if one.finished_at_s]
    assert len(finished) >= 3
    assert all(one.counted_prompts == PROMPTS and one.dropped_prompts == 0 for one in finished)
    assert all(one.version <= one.oldest_version <= one.newest_version for one in finished)
    assert main(["evaluations", "--ledger", str(directory.ledger)]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(finished)
