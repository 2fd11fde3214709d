"""A run of the last release is upgraded process by process while it trains; no group is lost or doubled."""

from pathlib import Path

import pytest

from deploy.runs.processes import Children
from deploy.runs.records import StepTail, differing_groups
from deploy.runs.run_directory import COORDINATOR, LEARNER, Section
from deploy.runs.run_session import RunSession
from node.commands.cli import main
from node.commands.status.status_command import fetch_status
from node.values.protocol import OURS
from support.waiting import eventually, until
from upgrade.digits_run import ENVIRON, RELAY, TESTS, broken_promises, configuration, make_directory
from upgrade.release import install_release

SAMPLER = "sampler-1"
NEWCOMER = "sampler-2"
"""Begins with today's code, as soon as the coordinator has it."""
ORDER = (COORDINATOR, RELAY, LEARNER, SAMPLER)
"""As docs/protocol.md has it."""
STEPS_BETWEEN = 2


@pytest.mark.needs("last release")
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(400)
async def test_a_run_of_the_last_release_is_upgraded_process_by_process(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "run")
    pythons = dict.fromkeys(ORDER, install_release(tmp_path / "release", imports=TESTS))
    steps = StepTail(directory.step_log)
    async with Children(log_of=directory.log, environ=ENVIRON, stop_timeout_s=120) as children:
        session = RunSession(
            directory,
            enrolled=(RELAY, SAMPLER, NEWCOMER),
            children=children,
            others=(RELAY,),
            pythons=pythons,
            ready_timeout_s=240,
        )

        async def goes_on(*upgraded: str) -> None:
            """Wait for some steps, and for the coordinator to know who speaks what."""
            version = len(steps.read()) + STEPS_BETWEEN
            await children.guard(until(lambda: len(steps.read()) >= version, within_s=120))
            speaks = {name: OURS.protocol if name in upgraded else OURS.oldest_protocol for name in ORDER[1:]}
            speaks[NEWCOMER] = OURS.protocol

            async def is_told() -> bool:
                status = await fetch_status(f"127.0.0.1:{session.ports.members}", session.operator())
                old = [one for one in status.unusual if "older protocol" in one.what]
                unusual = {name for one in old for name in one.node_ids}
                told = {peer.node_id: peer.protocol for peer in status.peers}
                return told == speaks and unusual == set(ORDER[1:]) - set(upgraded)

            await children.guard(eventually(is_told, within_s=120))

        own: dict[str, Section] = {
            "sampler": {
                "weight_sources": [f"127.0.0.1:{session.ports.others[RELAY]}"],
                "grader_environment": ["PYTHONSAFEPATH"],  # its graders are of the same release
            }
        }
        await session.make_run(
            {name: configuration(name, directory, session.ports, own=own) for name in (*ORDER, NEWCOMER)}
        )
        for name in (RELAY, SAMPLER):
            await session.let_in(name)
        for name in ORDER:  # one after the other: what the first compiles the next ones have
            await children.guard(session.start(name, environ={}))
        await children.guard(until(lambda: len(steps.read()) >= STEPS_BETWEEN, within_s=120))
        for number, name in enumerate(ORDER, start=1):
            assert await children.stop(name) == 0
            del pythons[name]
            await children.guard(session.start(name, environ={}))
            if name == COORDINATOR:
                await session.let_in(NEWCOMER)
                await children.guard(session.start(NEWCOMER, environ={}))
            await goes_on(*ORDER[:number])
        exit_codes = await session.drain()
    assert broken_promises(directory, steps, exit_codes) == []
    assert main(["ledger", "check", str(directory.ledger)]) == 0
    assert differing_groups(directory.ledger, directory.step_log) == []
