"""A verifier is killed in the middle of checks: real processes over mutual TLS."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.demo.warm_start import make_base_model
from deploy.runs.observation import Metrics, scrape
from deploy.runs.processes import Children
from deploy.runs.records import StepTail
from deploy.runs.run_directory import COORDINATOR, LEARNER, RunDirectory, Section
from deploy.runs.run_session import RunSession
from node.coordinator.work.checks.reward_checks import HELD_S
from support.waiting import eventually

SAMPLER, FIRST, NEXT = "sampler-1", "verifier-1", "verifier-2"
AT_ONCE = 8


class CheckedSession(RunSession):
    """A run with one sampler, which has two verifiers."""

    def __init__(self, directory: RunDirectory, *, children: Children) -> None:
        super().__init__(directory, enrolled=(SAMPLER, FIRST, NEXT), children=children)

    async def prepare(self) -> None:
        """Write everybody's configuration, and start who serves before any group is sampled."""
        directory, ports = self._directory, self.ports
        model = {"model_dir": str(directory.model)}
        sections: dict[str, Section] = {
            COORDINATOR: {
                "listen": f"127.0.0.1:{ports.members}",
                "enrolment_listen": f"127.0.0.1:{ports.enrolment}",
                "task": "addition",
                "group_size": 4,
                "batch_groups": 4,
                "max_staleness_versions": 100,
                "max_new_tokens": 4,
                "heartbeat_interval_s": 0.5,
                "require_verifier": True,
            },
            LEARNER: {**model, "threads": 1, "learning_rate": 1e-3},
            SAMPLER: {**model, "threads": 1, "seed": 1},
            FIRST: {**model, "groups_at_once": AT_ONCE},
            NEXT: {**model, "groups_at_once": AT_ONCE},
        }
        documents: dict[str, Mapping[str, Section]] = {
            name: {
                **directory.place(name, ports, dials=None if name == COORDINATOR else ports.members),
                name.partition("-")[0]: section,
            }
            for name, section in sections.items()
        }
        await self.make_run(documents)
        await self.start(COORDINATOR, environ={})
        for name in (SAMPLER, FIRST, NEXT):
            await self.let_in(name)
        for name in (LEARNER, FIRST):
            await self.start(name, environ={})

    async def numbers(self) -> Metrics:
        """Scrape the coordinator."""
        return await scrape(self.ports.telemetry[COORDINATOR]) or Metrics()

    async def has(self, name: str, at_least: float, **labels: str) -> bool:
        metric = f"heterorl_coordinator_{name}"
        return (await self.numbers()).total(metric, **labels) >= at_least


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(240)
async def test_what_a_killed_verifier_was_checking_is_checked_by_the_next_before_it_is_late(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    first = {f"{slot}.1" for slot in range(AT_ONCE)}
    make_base_model(directory.model, accuracy=0.3, seed=0)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    async with Children(log_of=directory.log, environ=environ) as children:
        session = CheckedSession(directory, children=children)
        steps = StepTail(directory.step_log)

        async def are_trained_on() -> bool:
            return first <= {group.group_id for step in steps.read() for group in step.groups}

        await session.prepare()
        await eventually(lambda: session.has("verifiers", 1))
        children.signal(FIRST, signal.SIGSTOP)
        await session.start(SAMPLER, environ={})
        # A newcomer's groups are all drawn: the first ones are at the verifier that has stopped.
        await eventually(lambda: session.has("groups_total", AT_ONCE + 4, verdict="spooled"))
        await session.start(NEXT, environ={})
        await eventually(lambda: session.has("reward_checks_total", 4, outcome="agreed"))
        await session.kill(FIRST)
        await eventually(are_trained_on, within_s=HELD_S / 2)
        numbers = await session.numbers()
        await session.drain()
    checks = numbers.by_label("heterorl_coordinator_reward_checks_total", "outcome")
    assert checks.pop("agreed") >= AT_ONCE + 4
    assert not any(checks.values()), checks
