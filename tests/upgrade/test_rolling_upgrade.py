"""A run of the last release is upgraded process by process while it trains; no group is lost or doubled."""

import os
from pathlib import Path

import pytest

from deploy.runs.processes import ONE_THREAD_EACH, Children
from deploy.runs.promises import promises_of_any_run
from deploy.runs.records import StepTail, differing_groups, read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, Section, role_of
from deploy.runs.run_session import RunSession
from node.commands.cli import main
from node.commands.status.status_command import fetch_status
from node.values.protocol import OURS
from support.tiny_model import make_tiny_model
from support.waiting import eventually, until
from upgrade.release import ROOT, install_release

RELAY = "relay-1"
SAMPLER = "sampler-1"
NEWCOMER = "sampler-2"
"""Begins with today's code, as soon as the coordinator has it."""
ORDER = (COORDINATOR, RELAY, LEARNER, SAMPLER)
"""As docs/protocol.md has it."""
STEPS_BETWEEN = 2
TESTS = Path(__file__).parents[1]


def configuration(name: str, directory: RunDirectory, ports: Ports) -> dict[str, Section]:
    model = {"model_dir": str(directory.model), "threads": 1}
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
            "concurrency_groups": 8,
        },
        LEARNER: {**model, "learning_rate": 1e-4},
        "relay": {"listen": f"127.0.0.1:{ports.others[RELAY]}"},
        "sampler": {
            **model,
            "weight_sources": [f"127.0.0.1:{ports.others[RELAY]}"],
            "concurrency_groups": 4,
            "grader_environment": ["PYTHONSAFEPATH"],  # its graders are of the same release
        },
    }
    dials = None if name == COORDINATOR else ports.members
    document = {**directory.place(name, ports, dials=dials), role_of(name): sections[role_of(name)]}
    if role_of(name) == "sampler":
        document["sampler.custom_tasks"] = {"digits": "upgrade.digits_task:DigitsTask"}
    return document


@pytest.mark.needs("last release")
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(400)
async def test_a_run_of_the_last_release_is_upgraded_process_by_process(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    make_tiny_model(directory.model, hidden=32, layers=1)
    pythons = dict.fromkeys(ORDER, install_release(tmp_path / "release", imports=TESTS))
    steps = StepTail(directory.step_log)
    imports = os.pathsep.join(map(str, (ROOT, ROOT / "proto", TESTS)))
    environ = os.environ | ONE_THREAD_EACH | {"PYTHONPATH": imports}
    async with Children(log_of=directory.log, environ=environ, stop_timeout_s=120) as children:
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

        await session.make_run(
            {name: configuration(name, directory, session.ports) for name in (*ORDER, NEWCOMER)}
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
    promises = promises_of_any_run(
        versions=len(steps.read()),
        steps=steps.steps,
        ledger=read_ledger(directory.ledger, run_id=directory.run_id),
        exit_codes=exit_codes,
    )
    assert [f"{c.promise}: {c.figures}" for c in promises if not c.is_kept] == []
    assert main(["ledger", "check", str(directory.ledger)]) == 0
    assert differing_groups(directory.ledger, directory.step_log) == []
