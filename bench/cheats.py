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
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.cheat_lab.cheated_run import CheatedRun
from bench.cheat_lab.lies import AS_HONEST, BFLOAT16, CHEATS, LATE, Cheat
from bench.shared.demo_run import demo_model, in_turn, kept_below, run_parser
from deploy.demo.plan import BATCH_GROUPS
from deploy.runs.processes import Children
from deploy.runs.run_directory import LEARNER
from node.coordinator.work.samplers.sampler_standing import Standing
from sampler.process_tree import cpu_seconds

MOST_LOSS: Final = 0.02
MOST_COST: Final = 0.03
SAMPLERS: Final = ("sampler-1", "sampler-2", "sampler-3")
VERIFIER: Final = "verifier-1"

Case = tuple[Cheat | None, bool]
"""A cheat, or none, and whether there is a verifier."""


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


def cheats_of(cheat: Cheat | None) -> dict[str, Cheat]:
    """Return who lies; with a late cheat the first sampler is late, and lies about nothing."""
    if cheat is None:
        return {}
    late = {SAMPLERS[0]: Cheat(LATE)} if cheat.has_late else {}
    return late | dict.fromkeys(SAMPLERS[len(SAMPLERS) - cheat.liars :], cheat)


async def begin(run: CheatedRun, model: Path, *, cheat: Cheat | None, versions: int) -> None:
    """Make the run on ``model`` and bring every process up, the verifier before samplers.

    Raises:
        ChildError: one did not come up.
    """
    changes = run.changes(BATCH_GROUPS)
    changes[LEARNER] = {"learner": {**changes[LEARNER]["learner"], "max_versions": versions}}
    for number, name in enumerate(SAMPLERS):
        seed = len(SAMPLERS) * run.seed + number
        is_narrow = cheat is not None and cheat.lie == BFLOAT16 and number
        dtype = "bfloat16" if is_narrow else "float32"
        changes[name] = {"sampler": {"compute_dtype": dtype, "seed": seed, "concurrency_groups": 16}}
    await run.make(model, changes)
    for name in run.verifiers:
        await run.start(name, environ={})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run.start(LEARNER, environ={}))
        for name in SAMPLERS:
            tasks.create_task(run.start_sampler(name))


async def measure(
    case: Case, place: Path, children: Children, *, model: Path, given: argparse.Namespace
) -> Measured:
    """Run until the learner has made its last version.

    Raises:
        ChildError: a process ended, or the learner did not within ``given.timeout``.
    """
    cheat, has_verifier = case
    cheats, verifiers = cheats_of(cheat), [VERIFIER] if has_verifier else []
    run = CheatedRun(
        place, children=children, samplers=SAMPLERS, verifiers=verifiers, cheats=cheats, seed=given.seed
    )
    await begin(run, model, cheat=cheat, versions=given.versions)
    measured = (*SAMPLERS, *run.verifiers)
    started = {name: cpu_seconds(children.pid(name)) for name in measured}
    if not await run.wait_for_last_step(timeout_s=given.timeout):
        raise children.failure(LEARNER, f"has not made its last version after {given.timeout:.0f} s")
    cpu_s = {name: cpu_seconds(children.pid(name)) - started[name] for name in measured}
    await run.drain()
    caught, steps = run.caught(), run.steps().read()
    liars = {name for name, one in cheats.items() if one.lie != LATE}
    found = {name: one for name, one in caught.shut_out.items() if name in liars}
    within = [
        sum(at_s < one.quarantined_at_s for at_s in caught.told[name].values()) for name, one in found.items()
    ]
    sampled_s = sum(cpu_s[name] for name in SAMPLERS)
    return Measured(
        name="honest" if cheat is None else cheat.name,
        liars=len(liars),
        has_verifier=has_verifier,
        found=len(found),
        found_by=tuple(sorted(set(map(_found_by, found.values())))),
        found_within=max(within, default=float("nan")),
        falsely_found=len(caught.shut_out) - len(found),
        groups=sum(caught.verdicts.get(name, {}).get("spooled", 0) for name in liars),
        lies=caught.lies,
        lies_trained_on=caught.trained_on,
        reward=fmean(step.reward_mean for step in steps[-max(1, len(steps) // 5) :]),
        cost=cpu_s.get(VERIFIER, 0.0) / sampled_s if sampled_s else float("nan"),
    )


def _found_by(one: Standing) -> str:
    if one.is_proven_liar:
        return "verifier"
    return "copies" if "copies" in one.quarantine else "logprobs"


def _row(one: Measured) -> str:
    return (
        f"{one.name:25} {'yes' if one.has_verifier else 'no':8}  {one.found}/{one.liars}    "
        f"{'+'.join(one.found_by):8}  {one.found_within:6.0f}  {one.falsely_found:5}  {one.groups:6}  "
        f"{one.lies:4}  {one.lies_trained_on:10}  {one.reward:6.3f}  {one.cost:6.2%}"
    )


async def _measure_all(root: Path, cases: list[Case], given: argparse.Namespace) -> bool:
    model, honest_reward, is_kept = await demo_model(root, seed=given.seed), None, True
    print(
        "cheat                     verifier  found  by        within  false  groups  lies  trained on  "
        "reward   cost",
        flush=True,
    )
    async for (cheat, has_verifier), one in in_turn(root, cases, partial(measure, model=model, given=given)):
        print(_row(one), flush=True)
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
    parser = run_parser("cheats", __doc__, [cheat.name for cheat in CHEATS])
    parser.add_argument("--versions", type=int, default=100, help="of each run; default: %(default)s")
    parser.add_argument("--timeout", type=float, default=3600.0, help="s of each run; default: %(default)s")
    given = parser.parse_args()
    cases: list[Case] = [(cheat, True) for cheat in CHEATS if not given.cases or cheat.name in given.cases]
    if not given.cases:
        cases.append((Cheat("inverted"), False))
    return kept_below(
        given.directory, "cheats", lambda root: _measure_all(root, [(None, True), *cases], given)
    )


if __name__ == "__main__":
    sys.exit(main())
