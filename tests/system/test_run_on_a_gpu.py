"""A run of real processes over mutual TLS whose learner and samplers share a GPU, and learn."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.demo.plan import Plan
from deploy.demo.session import Session
from deploy.runs.processes import Children
from deploy.runs.promises import promises_of_any_run, reward_at_first, reward_at_last
from deploy.runs.records import StepTail, read_ledger
from deploy.runs.run_directory import COORDINATOR, RunDirectory, role_of
from support.gpu import DEVICE

VERSIONS = 60
GAIN = 0.2
"""Least rise of the mean reward, half of what 30 versions of the demo gained on a CPU."""


class SessionOnDevice(Session):
    """A session whose learner and samplers compute on ``DEVICE``, or do not start."""

    async def start(self, name: str, *, environ: Mapping[str, str], module: str = "node") -> None:
        ours = {f"HETERORL_{role_of(name).upper()}__DEVICE": DEVICE} if name != COORDINATOR else {}
        await super().start(name, environ={**environ, **ours}, module=module)


@pytest.mark.gpu
@pytest.mark.timeout(300)
async def test_learner_and_samplers_on_a_gpu_learn_and_every_group_counts_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    async with Children(log_of=directory.log, environ=environ) as children:
        plan = Plan(seed=0, versions=VERSIONS, has_chaos=False)
        session = SessionOnDevice(plan, directory, children=children)
        await session.begin()
        assert await session.wait_for_last_step(timeout_s=200)
        exit_codes = await session.drain()
    steps = StepTail(directory.step_log).read()
    ledger = read_ledger(directory.ledger, run_id=directory.run_id)
    promises = promises_of_any_run(versions=VERSIONS, steps=steps, ledger=ledger, exit_codes=exit_codes)
    assert [f"{c.promise}: {c.figures}" for c in promises if not c.is_kept] == []
    assert {group.sampler_id for step in steps for group in step.groups} == {"sampler-1", "sampler-2"}
    assert max(step.kl_nats for step in steps) < 1.0
    first, last = reward_at_first(steps), reward_at_last(steps)
    assert last >= first + GAIN, f"the mean reward went from {first:.3f} to {last:.3f}"
