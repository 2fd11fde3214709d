"""Two samplers that reach the coordinator through a relay alone: it is killed, stands still, is replaced."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from deploy.runs.processes import ONE_THREAD_EACH, Children
from deploy.runs.promises import promises_of_any_run
from deploy.runs.records import StepTail, read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, Section, role_of
from deploy.runs.run_session import RunSession
from support.tiny_model import make_tiny_model
from support.waiting import until

RELAY, SUCCESSOR = "relay-1", "relay-2"
SAMPLERS = ("sampler-1", "sampler-2")
STEPS_BETWEEN = 3
STANDS_STILL_S = 45.0
"""Longer than any end waits for a ping, and than leases last."""
TESTS = Path(__file__).parents[1]


def configuration(name: str, directory: RunDirectory, ports: Ports) -> dict[str, Section]:
    model = {"model_dir": str(directory.model), "threads": 1}
    relay = f"127.0.0.1:{ports.others[RELAY]}"
    sections: dict[str, Section] = {
        COORDINATOR: {
            "listen": f"127.0.0.1:{ports.members}",
            "enrolment_listen": f"127.0.0.1:{ports.enrolment}",
            "task": "digits",
            "prompts": 100,
            "group_size": 4,
            "batch_groups": 4,
            "max_staleness_versions": 64,
            "max_new_tokens": 6,
            "heartbeat_interval_s": 0.25,
            "lease_ttl_s": 20,
            "concurrency_groups": 8,
        },
        LEARNER: {**model, "learning_rate": 1e-4},
        "relay": {"listen": relay},
        "sampler": {**model, "relays": [relay], "concurrency_groups": 4},
    }
    is_behind = role_of(name) == "sampler"
    dials = None if name == COORDINATOR or is_behind else ports.members
    document = {**directory.place(name, ports, dials=dials), role_of(name): sections[role_of(name)]}
    if is_behind:
        document["sampler.custom_tasks"] = {"digits": "upgrade.digits_task:DigitsTask"}
    return document


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(400)
async def test_a_relay_that_is_killed_stands_still_and_is_replaced_costs_no_group(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    make_tiny_model(directory.model, hidden=32, layers=1)
    steps = StepTail(directory.step_log)
    environ = os.environ | ONE_THREAD_EACH | {"PYTHONPATH": str(TESTS)}
    async with Children(log_of=directory.log, environ=environ, stop_timeout_s=120) as children:
        session = RunSession(
            directory, enrolled=(RELAY, SUCCESSOR, *SAMPLERS), children=children, others=(RELAY,)
        )
        names = (COORDINATOR, LEARNER, RELAY, SUCCESSOR, *SAMPLERS)

        async def goes_on() -> None:
            """Wait for some steps on groups that the samplers begin from now on, too."""
            version = len(steps.read()) + STEPS_BETWEEN + 2
            await children.guard(until(lambda: len(steps.read()) >= version, within_s=120))

        await session.make_run({name: configuration(name, directory, session.ports) for name in names})
        await children.guard(session.start(COORDINATOR, environ={}))
        for name in (LEARNER, RELAY, *SAMPLERS):
            if name != LEARNER:
                # Enrolled at the coordinator: a relay leads to its members' port alone.
                await session.let_in(name)
            await children.guard(session.start(name, environ={}))
        await goes_on()
        await session.kill(RELAY)
        await children.guard(session.start(RELAY, environ={}))
        await goes_on()
        children.signal(RELAY, signal.SIGSTOP)
        await children.guard(asyncio.sleep(STANDS_STILL_S))
        children.signal(RELAY, signal.SIGCONT)
        await goes_on()
        assert await children.stop(RELAY) == 0
        await session.let_in(SUCCESSOR)
        await children.guard(session.start(SUCCESSOR, environ={}))
        await goes_on()
        exit_codes = {
            name: await children.stop(name) for name in (LEARNER, *SAMPLERS, SUCCESSOR, COORDINATOR)
        }
    ledger = read_ledger(directory.ledger, run_id=directory.run_id)
    promises = promises_of_any_run(
        versions=len(steps.read()), steps=steps.steps, ledger=ledger, exit_codes=exit_codes
    )
    assert [f"{check.promise}: {check.figures}" for check in promises if not check.is_kept] == []
    for name in SAMPLERS:
        verdicts = ledger.verdicts[name]
        assert verdicts.get("trained"), name
        assert not {"duplicate", "foreign", "malformed"} & verdicts.keys(), verdicts
