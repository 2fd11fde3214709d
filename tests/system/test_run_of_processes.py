"""A run of real processes over mutual TLS that evaluates; each is killed without warning in mid-work."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from deploy.demo.plan import NEAR, Plan
from deploy.demo.session import Session
from deploy.runs.processes import Children
from deploy.runs.promises import promises_of_any_run
from deploy.runs.records import StepTail, read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, RunDirectory
from node.commands.status.status_command import fetch_status
from node.coordinator.ledger.ledger_check import read_evaluations
from node.errors import StartupError
from support.waiting import eventually, until

VERSIONS = 20
EVERY_VERSIONS = 4
PROMPTS = 12


class EvaluatedSession(Session):
    """A session whose coordinator evaluates."""

    async def start(self, name: str, *, environ: Mapping[str, str], module: str = "node") -> None:
        evaluation = json.dumps({"every_versions": EVERY_VERSIONS, "prompts": PROMPTS})
        # A second sampler is waited for as long as a lease lasts, and the far one takes its time.
        ours = {"HETERORL_COORDINATOR__EVALUATION": evaluation, "HETERORL_COORDINATOR__LEASE_TTL_S": "20"}
        environ = {**environ, **ours} if name == COORDINATOR else environ
        await super().start(name, environ=environ, module=module)


def has_stepped(directory: RunDirectory, version: int) -> Callable[[], bool]:
    steps = StepTail(directory.step_log)
    return lambda: any(step.version >= version for step in steps.read())


def is_half_evaluated(directory: RunDirectory, version: int) -> Callable[[], bool]:
    def is_half_done() -> bool:
        try:
            evaluations = read_evaluations(directory.ledger)
        except StartupError:  # it restarts
            return False
        return any(one.version >= version and one.counted_prompts for one in evaluations)

    return is_half_done


async def knows_a_step(session: Session) -> bool:
    """Return whether the coordinator knows one: after a restart it hears of it with the next heartbeat."""
    status = await fetch_status(f"127.0.0.1:{session.ports.members}", session.operator())
    return status.step is not None


async def status_line(children: Children, session: Session, directory: RunDirectory, label: str) -> str:
    """Return the line of ``heterorl-node status`` that begins with ``label``."""
    out = await children.run(
        "status",
        *("node", "status", "--state-dir", str(directory.coordinator_state)),
        *("--coordinator", f"127.0.0.1:{session.ports.members}"),
    )
    (line,) = [line for line in out.splitlines() if line.startswith(label)]
    return line


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(240)
async def test_whatever_is_killed_versions_go_on_and_each_group_and_held_out_prompt_counts_once(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    async with Children(log_of=directory.log, environ=environ) as children:
        session = EvaluatedSession(
            Plan(seed=0, versions=VERSIONS, has_chaos=False), directory, children=children
        )
        await session.begin()
        for name, moment in (
            (COORDINATOR, is_half_evaluated(directory, 0)),
            (LEARNER, has_stepped(directory, 3)),
            (NEAR, is_half_evaluated(directory, EVERY_VERSIONS)),
            (COORDINATOR, is_half_evaluated(directory, 2 * EVERY_VERSIONS)),
        ):
            await until(moment)
            await session.kill(name)
            await session.start(name, environ={})
        assert await session.wait_for_last_step(timeout_s=60)
        await eventually(partial(knows_a_step, session), within_s=60)
        said = await status_line(children, session, directory, "staleness")
        exit_codes = await session.drain()
    promises = promises_of_any_run(
        versions=VERSIONS,
        steps=StepTail(directory.step_log).read(),
        ledger=read_ledger(directory.ledger, run_id=directory.run_id),
        exit_codes=exit_codes,
    )
    assert [f"{c.promise}: {c.figures}" for c in promises if not c.is_kept] == []
    # From what the learner has measured since it was last started.
    assert re.match(r"staleness beyond lag \d+ the effective sample size of token weights may halve", said)
    assert "(bound is 32 versions)" in said
    epoch = await asyncio.to_thread((directory.state(LEARNER) / LEARNER / "epoch").read_text)
    assert json.loads(epoch) == 2
    finished = [one for one in read_evaluations(directory.ledger) if one.finished_at_s]
    assert len(finished) >= 3
    assert max(one.samplers for one in finished) == 2
    assert all(one.counted_prompts == PROMPTS and one.has_score for one in finished)
