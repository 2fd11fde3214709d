"""``python -m bench.cheats``: what samplers that cheat do to a run, and how soon they are found.

Each cheat meets a run of the demo's task of its own: coordinator, learner, three samplers and a verifier,
real processes over mutual TLS. Cheats lie about rewards, hand in tokens that they did not draw, or draw by
other weights than they say. Prints a row for each: who found them (the verifier; the learner, by logprobs or
by copies), the groups that one had handed in by then, all groups and lies of the liars, lies that were
trained on, honest samplers shut out, the mean reward of the last fifth of the steps, and the verifier's CPU
time over that of all samplers. The first run has no liar, the last has one and no
verifier. Exits with 1 if a liar was not found (other than ``AS_HONEST``) or an honest sampler was, the reward
fell by more than ``MOST_LOSS`` or checks cost more than ``MOST_COST``.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.cheat_lab.lies import AS_HONEST, BFLOAT16, CHEATS, LATE, Cheat
from bench.cheat_lab.lying_node import environment
from bench.shared.demo_run import DemoRun, demo_model, kept_below
from deploy.demo.plan import BATCH_GROUPS
from deploy.runs.processes import Children, children_below
from deploy.runs.records import StepTail, read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, RunDirectory, Section
from node.coordinator.work.samplers.sampler_standing import Standing
from sampler.process_tree import cpu_seconds

MOST_LOSS: Final = 0.02
MOST_COST: Final = 0.03
SAMPLERS: Final = ("sampler-1", "sampler-2", "sampler-3")
VERIFIER: Final = "verifier-1"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    name: str
    liars: int
    has_verifier: bool
    found: int
    """Liars that were shut out."""
    found_by: tuple[str, ...]
    """verifier, logprobs or copies."""
    found_within: float
    """Groups that a liar had lied about when it was shut out; the most of all of them, NaN if none was."""
    falsely_found: int
    groups: int
    """Handed in by the liars."""
    lies: int
    lies_trained_on: int
    reward: float
    """Mean of the last fifth of the steps; as claimed, where liars that are not found lie about it."""
    cost: float
    """CPU time of the verifier over that of all samplers, after their starts."""
    seconds: float


class CheatRun(DemoRun):
    """One run below ``root``, some of whose samplers lie. The caller ends the children that are left."""

    def __init__(
        self,
        root: Path,
        *,
        children: Children,
        cheat: Cheat | None,
        has_verifier: bool,
        versions: int,
        seed: int,
    ) -> None:
        verifiers = [VERIFIER] if has_verifier else []
        super().__init__(root, children=children, samplers=SAMPLERS, verifiers=verifiers)
        self.cheat = cheat
        self.liars = SAMPLERS[len(SAMPLERS) - cheat.liars :] if cheat is not None else ()
        self._versions, self._seed = versions, seed

    async def begin(self, model: Path) -> None:
        """Make the run on ``model`` and bring every process up, the verifier before samplers.

        Raises:
            ChildError: one did not come up.
        """
        await self.make(model, self._changes())
        for name in self.verifiers:
            await self.start(name, environ={})
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.start(LEARNER, environ={}))
            for name in SAMPLERS:
                tasks.create_task(self._start_sampler(name))

    def told(self, name: str) -> dict[str, float]:
        """Return the groups that a liar lied about: id -> Unix seconds."""
        path = self._lies(name)
        lines = path.read_text().splitlines() if path.exists() else []
        return {group_id: float(at_s) for group_id, at_s in map(str.split, lines)}

    async def _start_sampler(self, name: str) -> None:
        cheat = self.cheat
        if name not in self.liars:
            if cheat is None or not cheat.has_late or name != SAMPLERS[0]:
                await self.start(name, environ={})
                return
            cheat = Cheat(LATE)
        assert cheat is not None
        environ = environment(cheat, lies=self._lies(name), league=self.directory.root / "league")
        await self.start(name, environ=environ, module=environment.__module__)

    def _lies(self, name: str) -> Path:
        return self.directory.root / f"{name}.lies"

    def _changes(self) -> dict[str, Mapping[str, Section]]:
        coordinator: Section = {
            "prompt_seed": self._seed,
            "heartbeat_interval_s": 0.5,
            "lease_ttl_s": 20.0,
            "concurrency_groups": 3 * BATCH_GROUPS,
            "buffer_groups": 4 * BATCH_GROUPS,
        }
        changes: dict[str, Mapping[str, Section]] = {
            COORDINATOR: {"coordinator": coordinator},
            LEARNER: {"learner": {"buffer_groups": 2 * BATCH_GROUPS, "max_versions": self._versions}},
        }
        for number, name in enumerate(SAMPLERS):
            seed = len(SAMPLERS) * self._seed + number
            is_narrow = self.cheat is not None and self.cheat.lie == BFLOAT16 and number
            dtype = "bfloat16" if is_narrow else "float32"
            changes[name] = {"sampler": {"compute_dtype": dtype, "seed": seed, "concurrency_groups": 16}}
        return changes


async def measure(run: CheatRun, children: Children, model: Path, *, timeout_s: float) -> Measured:
    """Run until the learner has made its last version.

    Raises:
        ChildError: a process ended, or the learner did not within ``timeout_s``.
    """
    began_s = time.monotonic()
    await run.begin(model)
    measured = (*SAMPLERS, *run.verifiers)
    started = {name: cpu_seconds(children.pid(name)) for name in measured}
    if not await run.wait_for_last_step(timeout_s=timeout_s):
        raise children.failure(LEARNER, f"has not made its last version after {timeout_s:.0f} s")
    cpu_s = {name: cpu_seconds(children.pid(name)) - started[name] for name in measured}
    await run.drain()
    ledger = read_ledger(run.directory.ledger, run_id=run.directory.run_id)
    trained = {group_id for group_ids in ledger.steps.values() for group_id in group_ids}
    told = {name: run.told(name) for name in run.liars}
    shut_out = run.shut_out()
    found = {name: one for name, one in shut_out.items() if name in run.liars}
    within = [sum(at_s < one.quarantined_at_s for at_s in told[name].values()) for name, one in found.items()]
    sampled_s = sum(cpu_s[name] for name in SAMPLERS)
    return Measured(
        name="honest" if run.cheat is None else run.cheat.name,
        liars=len(run.liars),
        has_verifier=VERIFIER in cpu_s,
        found=len(found),
        found_by=tuple(sorted(set(map(_found_by, found.values())))),
        found_within=max(within, default=float("nan")),
        falsely_found=len(shut_out) - len(found),
        groups=sum(ledger.verdicts.get(name, {}).get("spooled", 0) for name in run.liars),
        lies=sum(map(len, told.values())),
        lies_trained_on=sum(len(trained.intersection(group_ids)) for group_ids in told.values()),
        reward=_last_reward(run.directory),
        cost=cpu_s.get(VERIFIER, 0.0) / sampled_s if sampled_s else float("nan"),
        seconds=time.monotonic() - began_s,
    )


def _found_by(one: Standing) -> str:
    if one.is_proven_liar:
        return "verifier"
    return "copies" if "copies" in one.quarantine else "logprobs"


def _last_reward(directory: RunDirectory) -> float:
    steps = StepTail(directory.step_log).read()
    return fmean(step.reward_mean for step in steps[-max(1, len(steps) // 5) :])


def _row(one: Measured) -> str:
    return (
        f"{one.name:25} {'yes' if one.has_verifier else 'no':8}  {one.found}/{one.liars}    "
        f"{'+'.join(one.found_by):8}  {one.found_within:6.0f}  {one.falsely_found:5}  {one.groups:6}  "
        f"{one.lies:4}  {one.lies_trained_on:10}  {one.reward:6.3f}  {one.cost:6.2%}"
    )


async def _measure_all(root: Path, runs: list[tuple[Cheat | None, bool]], given: argparse.Namespace) -> bool:
    model, honest_reward, is_kept = await demo_model(root, seed=given.seed), None, True
    print(
        "cheat                     verifier  found  by        within  false  groups  lies  trained on  "
        "reward   cost",
        flush=True,
    )
    for number, (cheat, has_verifier) in enumerate(runs):
        place = root / f"run-{number}"
        async with children_below(place) as children:
            run = CheatRun(
                place,
                children=children,
                cheat=cheat,
                has_verifier=has_verifier,
                versions=given.versions,
                seed=given.seed,
            )
            one = await children.guard(measure(run, children, model, timeout_s=given.timeout))
        print(_row(one), flush=True)
        (place / "measured.json").write_text(json.dumps(asdict(one)))
        if cheat is None:
            honest_reward = one.reward
        loss = 0.0 if honest_reward is None else honest_reward - one.reward
        if has_verifier:
            may_stay = cheat is not None and cheat.lie in AS_HONEST
            is_kept &= (may_stay or one.found == one.liars) and not one.falsely_found
            is_kept &= loss <= MOST_LOSS and one.cost <= MOST_COST
    return is_kept


def main() -> int:
    """Measure, print, and return the exit code."""
    given = _arguments()
    chosen = [cheat for cheat in CHEATS if not given.cheats or cheat.name in given.cheats]
    runs: list[tuple[Cheat | None, bool]] = [(None, True), *((cheat, True) for cheat in chosen)]
    if not given.cheats:
        runs.append((Cheat("inverted"), False))
    return kept_below(given.directory, "cheats", lambda root: _measure_all(root, runs, given))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cheats", description=__doc__.partition("\n")[0])
    names = [cheat.name for cheat in CHEATS]
    parser.add_argument("cheats", nargs="*", choices=[*names, []], default=[], help="default: all of them")
    parser.add_argument("--versions", type=int, default=100, help="of each run; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="of each run, seconds; default: %(default)s"
    )
    parser.add_argument("--directory", help="where the runs are kept; default: a temporary one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
