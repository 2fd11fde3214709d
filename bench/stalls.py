"""``python -m bench.stalls``: what samplers whose groups are slow to check do to the checks of others.

Each case is a run of the demo's task of its own: coordinator, learner, samplers and verifiers, real processes
over mutual TLS, for ``--seconds`` after the first step. One sampler is honest. In some cases another lies in
every group once it has handed in ``HONEST_FIRST`` honest ones, so that it is no newcomer any more; in some,
others stall the verifier (``bench.cheat_lab.stalling_node``), with every group or with a part of them; in
some a second verifier hangs (SIGSTOP) or the coordinator is restarted. Prints a row for each: lies told and
trained on, whether the liar was shut out, honest samplers shut out, steps a second, and that over the steps
of the same run without those that stall. Exits with 1 if more than ``MOST_LIES`` of the lies were trained on
(where fewer than ``FEW`` were told: more than ``FEW_TRAINED``), a run made less than ``LEAST_SPEED`` of the
steps of the one without, or an honest sampler was shut out.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bench.cheat_lab.cheated_run import CheatedRun
from bench.cheat_lab.lies import Cheat
from bench.cheat_lab.stalling_node import STALL
from bench.cheat_lab.stalling_task import StallingTask
from bench.shared.demo_run import READY_TIMEOUT_S, demo_model, in_turn, kept_below, run_parser
from deploy.runs.processes import Children
from deploy.runs.run_directory import COORDINATOR, LEARNER, Section

MOST_LIES: Final = 0.02
FEW: Final = 100
FEW_TRAINED: Final = 2
LEAST_SPEED: Final = 0.8
HONEST_FIRST: Final = 6
BATCH_GROUPS: Final = 8
HONEST, LIAR, HUNG = "sampler-1", "sampler-9", "verifier-2"
TASK: Final = "stalling"


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    name: str
    stallers: int = 0
    stalling_part: float = 1.0
    """Part of their decode steps that make a group slow to check."""
    has_liar: bool = False
    requires_verifier: bool = False
    has_hung_verifier: bool = False
    restarts_coordinator: bool = False
    compared_with: str = ""
    """The case without those that stall."""


_required: Final = partial(Case, requires_verifier=True, compared_with="required")

CASES: Final = (
    Case("liar", has_liar=True),
    Case("liar, staller", stallers=1, has_liar=True),
    Case("liar, 3 stallers", stallers=3, has_liar=True),
    Case("liar, staller, 1 in 4 slow", stallers=1, stalling_part=0.25, has_liar=True),
    Case("liar, staller, restart", stallers=1, has_liar=True, restarts_coordinator=True),
    Case("required", requires_verifier=True),
    _required("required, staller", stallers=1),
    _required("required, 3 stallers", stallers=3),
    _required("required, hung verifier", has_hung_verifier=True),
    _required("required, staller, hung", stallers=1, has_hung_verifier=True),
)


@dataclass(frozen=True, slots=True)
class Measured:
    lies: int
    trained_on: int
    liar_found: bool
    falsely_found: tuple[str, ...]
    steps_per_s: float
    outcomes: Mapping[str, int]
    """Verdict -> groups of those that stall."""


class StalledRun(CheatedRun):
    """A run below ``root``. The caller ends the children that are left."""

    def __init__(self, root: Path, case: Case, *, children: Children, seed: int) -> None:
        self.case = case
        self.stallers = tuple(f"sampler-{n + 2}" for n in range(case.stallers))
        super().__init__(
            root,
            children=children,
            samplers=(HONEST, *self.stallers, *([LIAR] if case.has_liar else [])),
            verifiers=("verifier-1", *([HUNG] if case.has_hung_verifier else [])),
            cheats={LIAR: Cheat("inverted", after=HONEST_FIRST)} if case.has_liar else {},
            seed=seed,
        )

    async def begin(self, model: Path) -> None:
        """Make the run on ``model`` and bring every process up, verifiers before samplers.

        Raises:
            ChildError: one did not come up.
        """
        await self.make(model, self._changes())
        for name in self.verifiers:
            await self.start(name, environ={})
        if self.case.has_hung_verifier:
            self._children.signal(HUNG, signal.SIGSTOP)
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        stall = {STALL: json.dumps({"plus": vocabulary["+"], "part": self.case.stalling_part})}
        async with asyncio.TaskGroup() as tasks:
            for name in self.stallers:
                tasks.create_task(self.start(name, environ=stall, module="bench.cheat_lab.stalling_node"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.start(LEARNER, environ={}))
            for name in (HONEST, *self.cheats):
                tasks.create_task(self.start_sampler(name))

    async def observe(self, seconds: float) -> None:
        """Let the run go on for so long after its first step."""
        steps, deadline_s = self.steps(), time.monotonic() + READY_TIMEOUT_S
        while not steps.read() and time.monotonic() < deadline_s:
            await self.wait_for_last_step(timeout_s=0.2)
        await asyncio.sleep(seconds / 2)
        if self.case.restarts_coordinator:
            await self._children.stop(COORDINATOR)
            await self.start(COORDINATOR, environ={})
        await asyncio.sleep(seconds / 2)
        if self.case.has_hung_verifier:
            self._children.signal(HUNG, signal.SIGCONT)

    def _changes(self) -> dict[str, Mapping[str, Section]]:
        tasks = {TASK: f"{StallingTask.__module__}:{StallingTask.__name__}"}
        changes = self.changes(BATCH_GROUPS)
        coordinator: Section = {
            **changes[COORDINATOR]["coordinator"],
            "task": TASK,
            "prompts": StallingTask.prompts,
            "require_verifier": self.case.requires_verifier,
        }
        changes[COORDINATOR] = {"coordinator": coordinator}
        changes |= {name: {"verifier.custom_tasks": tasks} for name in self.verifiers}
        for number, name in enumerate(self.samplers):
            # One grader process: it sets the sampler's pace.
            sampler = {"seed": 9 * self.seed + number, "grader_processes": 1}
            changes[name] = {"sampler": sampler, "sampler.custom_tasks": tasks}
        return changes


async def measure(
    case: Case, place: Path, children: Children, *, model: Path, given: argparse.Namespace
) -> Measured:
    """Run for so long and count.

    Raises:
        ChildError: a process ended.
    """
    run = StalledRun(place, case, children=children, seed=given.seed)
    await run.begin(model)
    await run.observe(given.seconds)
    await run.drain()
    caught, steps = run.caught(), run.steps().read()
    took_s = steps[-1].at_s - steps[0].at_s if len(steps) > 1 else 0.0
    stalled = sum((Counter(caught.verdicts.get(name, {})) for name in run.stallers), Counter[str]())
    return Measured(
        lies=caught.lies,
        trained_on=caught.trained_on,
        liar_found=LIAR in caught.shut_out,
        falsely_found=tuple(sorted(caught.shut_out.keys() & {HONEST})),
        steps_per_s=(len(steps) - 1) / max(took_s, given.seconds),
        outcomes=dict(stalled),
    )


def _is_kept(one: Measured, speed: float | None) -> bool:
    few = one.lies < FEW
    if one.trained_on > (FEW_TRAINED if few else MOST_LIES * one.lies) or one.falsely_found:
        return False
    return speed is None or speed >= LEAST_SPEED


async def _measure_all(root: Path, cases: list[Case], given: argparse.Namespace) -> bool:
    model, is_kept = await demo_model(root, seed=given.seed), True
    print("case                        lies  trained on  found  false  steps/s  of that without", flush=True)
    speeds: dict[str, float] = {}
    async for case, one in in_turn(root, cases, partial(measure, model=model, given=given)):
        speeds[case.name] = one.steps_per_s
        before = speeds.get(case.compared_with)
        speed = None if not before else one.steps_per_s / before
        shown = "" if speed is None else f"{speed:.0%}"
        print(
            f"{case.name:26}  {one.lies:4}  {one.trained_on:10}  {'yes' if one.liar_found else 'no':5}  "
            f"{len(one.falsely_found):5}  {one.steps_per_s:7.2f}  {shown:6}  {dict(one.outcomes) or ''}",
            flush=True,
        )
        is_kept &= _is_kept(one, speed)
    return is_kept


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = run_parser("stalls", __doc__, [case.name for case in CASES])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run; default: %(default)s")
    given = parser.parse_args()
    chosen = [case for case in CASES if not given.cases or case.name in given.cases]
    return kept_below(given.directory, "stalls", lambda root: _measure_all(root, chosen, given))


if __name__ == "__main__":
    sys.exit(main())
