"""A run of real processes over mutual TLS goes on while certified liars and strangers attack it."""

import asyncio
from pathlib import Path

import pytest

from bench.attack_lab import attacks
from bench.attack_lab.enemy import Enemy
from bench.attack_lab.prober import Answer, probing
from bench.attack_lab.stage import SAMPLERS, Stage
from deploy.demo.warm_start import make_base_model
from deploy.runs.processes import children_below
from deploy.runs.records import StepTail, read_ledger
from deploy.runs.run_directory import COORDINATOR
from node.commands.status.status_command import fetch_status
from support.waiting import until

ATTACKS = (
    attacks.crawling_clients,
    attacks.drop,
    attacks.fail_all,
    attacks.forge_evaluations,
    attacks.forge_logprobs,
    attacks.gzip_bombs,
    attacks.hoard,
    attacks.idle_connections,
    attacks.in_others_names,
    attacks.step_report,
    attacks.unknown_fields,
)

STEPS = 3
"""Made under each attack, by groups of the honest samplers."""

IDLE_CONNECTIONS = 128
BOMB_BYTES = 6 << 20
"""Less than `python -m bench.attacks` has: the run makes 30 steps while this process makes 1100 connections,
or 60 MB of zeros."""

ATTACK_TIMEOUT_S = 30.0

READY_TIMEOUT_S = 2.0
"""The coordinator says that it is ready within this time, whenever it is asked during an attack."""


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("warm_processes")
async def test_every_attack_leaves_the_run_stepping_on_groups_of_honest_samplers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks, "IDLE_CONNECTIONS", IDLE_CONNECTIONS)
    monkeypatch.setattr(attacks, "BOMB_BYTES", BOMB_BYTES)
    model = tmp_path / "model"
    await asyncio.to_thread(make_base_model, model, accuracy=0.2, seed=0)
    root = tmp_path / "run"
    async with children_below(root) as children:
        stage = Stage(root, children=children)
        await stage.begin(model)
        steps = StepTail(stage.directory.step_log)
        readiness = probing(stage.ports.telemetry[COORDINATOR], "/readyz", timeout_s=READY_TIMEOUT_S)
        async with readiness as answers:
            for attack in ATTACKS:
                enemy = Enemy(stage)
                attacking = asyncio.create_task(attack(enemy))
                try:
                    wanted, asked = len(steps.read()) + STEPS, len(answers)
                    await children.guard(has_made(stage, steps, wanted, attack.__name__))
                    assert await was_ready(answers, asked), attack.__name__
                finally:
                    attacking.cancel()
                    await asyncio.gather(attacking, return_exceptions=True)
                    await enemy.close()
        status = await fetch_status(f"127.0.0.1:{stage.ports.members}", stage.operator())
        made = len(steps.read())
        assert status.step is not None
        assert status.step.version <= made
        best = status.evaluation.best
        assert best is None or best.reward_mean is None or best.reward_mean <= 1
        exit_codes = await stage.drain()
    assert set(exit_codes.values()) == {0}
    ledger = read_ledger(stage.directory.ledger, run_id=stage.run_id)
    assert all("foreign" not in ledger.verdicts.get(name, {}) for name in SAMPLERS)


async def has_made(stage: Stage, steps: StepTail, wanted: int, attack: str) -> None:
    """Wait until the run has made so many steps."""
    try:
        await until(lambda: len(steps.read()) >= wanted, within_s=ATTACK_TIMEOUT_S)
    except TimeoutError:
        if len(steps.read()) >= wanted:  # the attack shares this process's event loop
            return
        status = await fetch_status(f"127.0.0.1:{stage.ports.members}", stage.operator())
        pytest.fail(f"{len(steps.steps)} of {wanted} steps under {attack}: {status}")


async def was_ready(answers: list[Answer], asked: int) -> bool:
    """Return whether all answers but the first ``asked`` are good; there is at least one."""
    await until(lambda: len(answers) > asked)
    return all(answer.is_good for answer in answers[asked:])
