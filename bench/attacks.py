"""``python -m bench.attacks``: what one liar, or a crowd of strangers, costs a run.

Each attack meets a run of its own: a coordinator, a learner and two honest samplers, real processes over
mutual TLS. The attackers have real certificates of the run, or none. Steps per second and the coordinator's
memory are measured before the attack, during it and after it; a process of its own asks /healthz all the
while. The attackers have one core, the run has the others: what is lost is what the attack costs the run, not
what it costs those who make it. Prints a line for each attack and a JSON summary. Exits with 1 if a run kept
less than ``PROMISED`` of its speed, its coordinator grew by more than ``GROWTH``, or an honest process ended.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from bench.attack_lab.attacks import ATTACKS
from bench.attack_lab.enemy import Enemy
from bench.attack_lab.prober import Answer, probing
from bench.attack_lab.stage import Stage
from bench.shared.demo_run import demo_model, kept_below, run_parser, say
from deploy.runs.processes import ChildError, children_below
from deploy.runs.records import StepTail
from deploy.runs.run_directory import COORDINATOR
from node.commands.status.status_command import fetch_status
from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost

PROMISED: Final = 0.8
GROWTH: Final = 1.3
HEALTH_TIMEOUT_S: Final = 1.0
DESCRIPTORS: Final = 1024
"""The usual soft limit, set as the coordinator's hard limit too."""

_CORES: Final = sorted(os.sched_getaffinity(0))
_LOOK_S: Final = 0.25
_WARM_STEPS: Final = 10
_WARM_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a run."""

    steps_per_s: float
    memory_bytes: int
    """Largest resident size of the coordinator."""
    unhealthy: int
    """Answers of /healthz that did not come within ``HEALTH_TIMEOUT_S``."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One attack on one run."""

    attack: str
    before: Phase
    during: Phase
    after: Phase
    did: dict[str, int]
    status: dict[str, Any]
    """Excerpt of the state of the run at the end of the attack."""

    @property
    def kept(self) -> float:
        return self._speed(self.during)

    @property
    def recovered(self) -> float:
        return self._speed(self.after)

    @property
    def growth(self) -> float:
        return max(self.during.memory_bytes, self.after.memory_bytes) / self.before.memory_bytes

    @property
    def is_survived(self) -> bool:
        return (
            min(self.kept, self.recovered) >= PROMISED
            and self.growth <= GROWTH
            and not self.during.unhealthy + self.after.unhealthy
        )

    def _speed(self, phase: Phase) -> float:
        return phase.steps_per_s / self.before.steps_per_s if self.before.steps_per_s else 0.0


async def measure(attack: str, root: Path, model: Path, *, seconds: float) -> Measured:
    """Attack a run of its own below ``root``.

    Raises:
        ChildError: an honest process ended, or the run did not begin.
    """
    *ours, theirs = _CORES if len(_CORES) > 1 else 2 * _CORES
    async with children_below(root) as children:
        stage = Stage(root, children=children)
        _move_to(ours)
        await stage.begin(model)
        _move_to([theirs])
        return await children.guard(_attacked(attack, stage, seconds=seconds))


def _move_to(cores: Sequence[int]) -> None:
    """Let this process, and what it starts from now on, run on these cores alone."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


async def _attacked(attack: str, stage: Stage, *, seconds: float) -> Measured:
    steps = StepTail(stage.directory.step_log)
    deadline_s = time.monotonic() + _WARM_TIMEOUT_S
    while len(steps.read()) < _WARM_STEPS:
        if time.monotonic() > deadline_s:
            raise ChildError(
                f"no {_WARM_STEPS} steps within {_WARM_TIMEOUT_S:.0f} s; see {stage.directory.root}"
            )
        await asyncio.sleep(_LOOK_S)
    resource.prlimit(stage.pid(COORDINATOR), resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    health = probing(stage.ports.telemetry[COORDINATOR], "/healthz", timeout_s=HEALTH_TIMEOUT_S)
    async with health as answers:
        before = await _phase(stage, steps, answers, seconds=seconds)
        enemy = Enemy(stage)
        attacking = asyncio.create_task(_only_refused(ATTACKS[attack](enemy)))
        try:
            during = await _phase(stage, steps, answers, seconds=seconds)
            status = await _excerpt(stage)
            if attacking.done():
                attacking.result()
        finally:
            attacking.cancel()
            await asyncio.gather(attacking, return_exceptions=True)
            await enemy.close()
        after = await _phase(stage, steps, answers, seconds=seconds)
    return Measured(attack, before, during, after, dict(enemy.did), status)


async def _only_refused(attack: Any) -> None:
    """Run an attack; being thrown out is an end like another."""
    with contextlib.suppress(RefusedError, ConnectionLost):
        await attack


async def _phase(stage: Stage, steps: StepTail, answers: list[Answer], *, seconds: float) -> Phase:
    coordinator = psutil.Process(stage.pid(COORDINATOR))
    began_s, memory_bytes, asked = time.time(), 0, len(answers)
    before = len(steps.read())
    while time.time() < began_s + seconds:
        memory_bytes = max(memory_bytes, coordinator.memory_info().rss)
        await asyncio.sleep(_LOOK_S)
    steps_per_s = (len(steps.read()) - before) / (time.time() - began_s)
    return Phase(steps_per_s, memory_bytes, sum(not answer.is_good for answer in answers[asked:]))


async def _excerpt(stage: Stage) -> dict[str, Any]:
    try:
        status = await fetch_status(f"127.0.0.1:{stage.ports.members}", stage.operator())
    except (ConnectionLost, RefusedError) as error:
        return {"error": str(error)}
    peers = {peer.node_id: {"state": peer.state, "verdicts": peer.verdicts} for peer in status.peers[:6]}
    return {
        "bound": status.capacity_bound,
        "slots": status.slots,
        "bad_prompts": status.bad_prompts_total,
        "step": None if status.step is None else status.step.version,
        "peers": peers,
    }


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = run_parser("attacks", __doc__, list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase; default: %(default)s")
    given = parser.parse_args()
    attacks = given.cases or list(ATTACKS)
    return kept_below(given.directory, "attacks", lambda root: _measure_all(attacks, root, given))


async def _measure_all(attacks: Sequence[str], root: Path, given: argparse.Namespace) -> bool:
    model = await demo_model(root, accuracy=0.2, seed=given.seed)
    results: list[dict[str, Any]] = []
    is_kept = True
    say(f"{'attack':24} {'before':>7} {'during':>7} {'after':>7} steps/s   kept  after  memory  unhealthy")
    for attack in attacks:
        try:
            one = await measure(attack, root / attack.replace("_", "-"), model, seconds=given.seconds)
        except ChildError as error:
            say(f"{attack:24} a process ended: {error}")
            results.append({"attack": attack, "error": str(error)})
            is_kept = False
            continue
        results.append(asdict(one))
        is_kept &= one.is_survived
        rates = " ".join(f"{phase.steps_per_s:7.2f}" for phase in (one.before, one.during, one.after))
        say(
            f"{attack:24} {rates}          {one.kept:5.2f}  {one.recovered:5.2f}  {one.growth:6.2f}  "
            f"{one.during.unhealthy + one.after.unhealthy:9}  {'' if one.is_survived else 'NOT KEPT'}\n"
            f"    {one.did}\n    {one.status}"
        )
    print(json.dumps({"promised": PROMISED, "growth": GROWTH, "attacks": results}))
    return is_kept


if __name__ == "__main__":
    sys.exit(main())
