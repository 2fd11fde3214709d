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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.cheat_lab.lies import Cheat
from bench.cheat_lab.lying_node import environment
from bench.cheat_lab.stalling_node import STALL
from bench.cheat_lab.stalling_task import StallingTask
from bench.shared.demo_run import DemoRun, demo_model, kept_below
from deploy.runs.processes import Children, children_below
from deploy.runs.records import StepTail, read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, Section

MOST_LIES: Final = 0.02
FEW: Final = 100
FEW_TRAINED: Final = 2
LEAST_SPEED: Final = 0.8
HONEST_FIRST: Final = 6
BATCH_GROUPS: Final = 8
HONEST, LIAR = "sampler-1", "sampler-9"
TASK: Final = "stalling"
READY_TIMEOUT_S: Final = 240.0


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


CASES: Final = (
    Case("liar", has_liar=True),
    Case("liar, staller", stallers=1, has_liar=True),
    Case("liar, 3 stallers", stallers=3, has_liar=True),
    Case("liar, staller, 1 in 4 slow", stallers=1, stalling_part=0.25, has_liar=True),
    Case("liar, staller, restart", stallers=1, has_liar=True, restarts_coordinator=True),
    Case("required", requires_verifier=True),
    Case("required, staller", stallers=1, requires_verifier=True, compared_with="required"),
    Case("required, 3 stallers", stallers=3, requires_verifier=True, compared_with="required"),
    Case(
        "required, hung verifier",
        requires_verifier=True,
        has_hung_verifier=True,
        compared_with="required",
    ),
    Case(
        "required, staller, hung",
        stallers=1,
        requires_verifier=True,
        has_hung_verifier=True,
        compared_with="required",
    ),
)


@dataclass(frozen=True, slots=True)
class Measured:
    lies: int
    trained_on: int
    liar_found: bool
    falsely_found: tuple[str, ...]
    steps: int
    steps_per_s: float
    outcomes: Mapping[str, int]
    """Verdict -> groups of those that stall."""


class StalledRun(DemoRun):
    """A run below ``root``. The caller ends the children that are left."""

    def __init__(self, root: Path, case: Case, *, children: Children, seed: int) -> None:
        self.case = case
        self.stallers = tuple(f"sampler-{n + 2}" for n in range(case.stallers))
        super().__init__(
            root,
            children=children,
            samplers=(HONEST, *self.stallers, *([LIAR] if case.has_liar else [])),
            verifiers=("verifier-1", *(["verifier-2"] if case.has_hung_verifier else [])),
        )
        self._seed = seed

    async def begin(self, model: Path) -> None:
        """Make the run on ``model`` and bring every process up, verifiers before samplers.

        Raises:
            ChildError: one did not come up.
        """
        await self.make(model, self._changes())
        for name in self.verifiers:
            await self.start(name, environ={})
        if self.case.has_hung_verifier:
            self._children.signal("verifier-2", signal.SIGSTOP)
        async with asyncio.TaskGroup() as tasks:
            for name in self.stallers:
                tasks.create_task(self._start_staller(name, model))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.start(LEARNER, environ={}))
            tasks.create_task(self.start(HONEST, environ={}))
            if self.case.has_liar:
                tasks.create_task(self._start_liar())

    async def observe(self, seconds: float) -> None:
        """Let the run go on for so long after its first step."""
        steps, deadline_s = StepTail(self.directory.step_log), time.monotonic() + READY_TIMEOUT_S
        while not steps.read() and time.monotonic() < deadline_s:
            await self.wait_for_last_step(timeout_s=0.2)
        if self.case.restarts_coordinator:
            await asyncio.sleep(seconds / 2)
            await self._children.stop(COORDINATOR)
            await self.start(COORDINATOR, environ={})
            await asyncio.sleep(seconds / 2)
        else:
            await asyncio.sleep(seconds)
        if self.case.has_hung_verifier:
            self._children.signal("verifier-2", signal.SIGCONT)

    def told(self) -> set[str]:
        """Return the ids of the groups that the liar lied about."""
        path = self.directory.root / "liar.lies"
        return {line.split()[0] for line in path.read_text().splitlines()} if path.exists() else set()

    async def _start_staller(self, name: str, model: Path) -> None:
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        stall = json.dumps({"plus": vocabulary["+"], "part": self.case.stalling_part})
        await self.start(name, environ={STALL: stall}, module="bench.cheat_lab.stalling_node")

    async def _start_liar(self) -> None:
        root = self.directory.root
        cheat = Cheat("inverted", after=HONEST_FIRST)
        environ = environment(cheat, lies=root / "liar.lies", league=root / "league")
        await self.start(LIAR, environ=environ, module=environment.__module__)

    def _changes(self) -> dict[str, Mapping[str, Section]]:
        tasks = {TASK: f"{StallingTask.__module__}:{StallingTask.__name__}"}
        coordinator: Section = {
            "task": TASK,
            "prompts": StallingTask.prompts,
            "prompt_seed": self._seed,
            "batch_groups": BATCH_GROUPS,
            "heartbeat_interval_s": 0.5,
            "lease_ttl_s": 20.0,
            "concurrency_groups": 3 * BATCH_GROUPS,
            "buffer_groups": 4 * BATCH_GROUPS,
            "require_verifier": self.case.requires_verifier,
        }
        changes: dict[str, Mapping[str, Section]] = {
            COORDINATOR: {"coordinator": coordinator},
            LEARNER: {"learner": {"buffer_groups": 2 * BATCH_GROUPS}},
            **{name: {"verifier.custom_tasks": tasks} for name in self.verifiers},
        }
        for number, name in enumerate(self.samplers):
            # One grader process: it sets the sampler's pace.
            sampler = {"seed": 9 * self._seed + number, "grader_processes": 1}
            changes[name] = {"sampler": sampler, "sampler.custom_tasks": tasks}
        return changes


async def measure(run: StalledRun, model: Path, *, seconds: float) -> Measured:
    """Run for so long and count.

    Raises:
        ChildError: a process ended.
    """
    await run.begin(model)
    await run.observe(seconds)
    await run.drain()
    ledger = read_ledger(run.directory.ledger, run_id=run.directory.run_id)
    trained = {group_id for group_ids in ledger.steps.values() for group_id in group_ids}
    told = run.told()
    shut_out = run.shut_out()
    steps = StepTail(run.directory.step_log).read()
    took_s = steps[-1].at_s - steps[0].at_s if len(steps) > 1 else 0.0
    stalled: dict[str, int] = {}
    for name in run.stallers:
        for verdict, n in ledger.verdicts.get(name, {}).items():
            stalled[verdict] = stalled.get(verdict, 0) + n
    return Measured(
        lies=len(told),
        trained_on=len(trained & told),
        liar_found=LIAR in shut_out,
        falsely_found=tuple(sorted(shut_out.keys() & {HONEST})),
        steps=len(steps),
        steps_per_s=(len(steps) - 1) / max(took_s, seconds),
        outcomes=stalled,
    )


def _is_kept(case: Case, one: Measured, speed: float | None) -> bool:
    few = one.lies < FEW
    if one.trained_on > (FEW_TRAINED if few else MOST_LIES * one.lies) or one.falsely_found:
        return False
    return speed is None or speed >= LEAST_SPEED


async def _measure_all(root: Path, cases: list[Case], given: argparse.Namespace) -> bool:
    model, is_kept = await demo_model(root, seed=given.seed), True
    print("case                        lies  trained on  found  false  steps/s  of that without", flush=True)
    speeds: dict[str, float] = {}
    for number, case in enumerate(cases):
        place = root / f"run-{number}"
        async with children_below(place) as children:
            run = StalledRun(place, case, children=children, seed=given.seed)
            one = await children.guard(measure(run, model, seconds=given.seconds))
        (place / "measured.json").write_text(json.dumps({"case": asdict(case), **asdict(one)}))
        speeds[case.name] = one.steps_per_s
        before = speeds.get(case.compared_with)
        speed = None if not before else one.steps_per_s / before
        shown = "" if speed is None else f"{speed:.0%}"
        print(
            f"{case.name:26}  {one.lies:4}  {one.trained_on:10}  {'yes' if one.liar_found else 'no':5}  "
            f"{len(one.falsely_found):5}  {one.steps_per_s:7.2f}  {shown:6}  {dict(one.outcomes) or ''}",
            flush=True,
        )
        is_kept &= _is_kept(case, one, speed)
    return is_kept


def main() -> int:
    """Measure, print, and return the exit code."""
    given = _arguments()
    chosen = [case for case in CASES if not given.cases or case.name in given.cases]
    return kept_below(given.directory, "stalls", lambda root: _measure_all(root, chosen, given))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.stalls", description=__doc__.partition("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", choices=[*names, []], default=[], help="default: all of them")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--directory", help="where the runs are kept; default: a temporary one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
