"""Two samplers that reach the coordinator through a relay alone: it is killed, stands still, is replaced."""

import asyncio
import signal
from pathlib import Path

import pytest

from deploy.runs.processes import Children
from deploy.runs.records import StepTail, read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, Section
from deploy.runs.run_session import RunSession
from support.waiting import until
from system.quick_pings import QUICK
from upgrade.digits_run import ENVIRON, RELAY, broken_promises, configuration, make_directory

SUCCESSOR = "relay-2"
SAMPLERS = ("sampler-1", "sampler-2")
STEPS_BETWEEN = 3
LEASE_TTL_S = 4.0
STANDS_STILL_S = 2.0 + max(LEASE_TTL_S, QUICK.ping_after_s + QUICK.give_up_after_s)
"""Longer than any end waits for a ping, and than leases last."""


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(400)
async def test_a_relay_that_is_killed_stands_still_and_is_replaced_costs_no_group(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    steps = StepTail(directory.step_log)
    async with Children(log_of=directory.log, environ=ENVIRON, stop_timeout_s=120) as children:
        session = RunSession(
            directory, enrolled=(RELAY, SUCCESSOR, *SAMPLERS), children=children, others=(RELAY,)
        )
        names = (COORDINATOR, LEARNER, RELAY, SUCCESSOR, *SAMPLERS)

        async def start(*names: str) -> None:
            async with asyncio.TaskGroup() as tasks:
                for name in names:
                    tasks.create_task(session.start(name, environ={}, module="system.quick_pings"))

        async def goes_on() -> None:
            """Wait for some steps on groups that the samplers begin from now on, too."""
            version = len(steps.read()) + STEPS_BETWEEN + 2
            await children.guard(until(lambda: len(steps.read()) >= version, within_s=120))

        own: dict[str, Section] = {
            COORDINATOR: {"lease_ttl_s": LEASE_TTL_S},
            "sampler": {"relays": [f"127.0.0.1:{session.ports.others[RELAY]}"]},
        }
        await session.make_run(
            {name: configuration(name, directory, session.ports, own=own) for name in names}
        )
        await children.guard(start(COORDINATOR))
        for name in names[2:]:
            # Enrolled at the coordinator: a relay leads to its members' port alone.
            await session.let_in(name)
        await children.guard(start(LEARNER, RELAY, *SAMPLERS))
        await goes_on()
        await session.kill(RELAY)
        await children.guard(start(RELAY))
        await goes_on()
        children.signal(RELAY, signal.SIGSTOP)
        await children.guard(asyncio.sleep(STANDS_STILL_S))
        children.signal(RELAY, signal.SIGCONT)
        await goes_on()
        assert await children.stop(RELAY) == 0
        await children.guard(start(SUCCESSOR))
        await goes_on()
        exit_codes = {
            name: await children.stop(name) for name in (LEARNER, *SAMPLERS, SUCCESSOR, COORDINATOR)
        }
    assert broken_promises(directory, steps, exit_codes) == []
    ledger = read_ledger(directory.ledger, run_id=directory.run_id)
    for name in SAMPLERS:
        verdicts = ledger.verdicts[name]
        assert verdicts.get("trained"), name
        assert not {"duplicate", "foreign", "malformed"} & verdicts.keys(), verdicts
