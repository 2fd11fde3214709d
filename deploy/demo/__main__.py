"""``python -m deploy.demo``: a whole run on this machine, shown live, its promises checked at the end.

    make run --> base model, coordinator, link --> learner, two samplers --> train --> drain --> check

Exits with 0 only if every promise was kept; see ``deploy.demo.checks`` and ``deploy.runs.promises``.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console

from deploy.demo import summary
from deploy.demo.chaos import Chaos, evaluate
from deploy.demo.checks import REWARD_AT_FIRST, REWARD_AT_LAST, promises_of_the_demo
from deploy.demo.plan import SAMPLERS, Plan
from deploy.demo.session import Session
from deploy.runs.live_view import View
from deploy.runs.observation import Observation
from deploy.runs.plot import plot, plot_by_lag
from deploy.runs.processes import ONE_THREAD_EACH, ChildError, Children
from deploy.runs.promises import promises_of_any_run, reward_at_first, reward_at_last
from deploy.runs.records import read_ledger
from deploy.runs.run_directory import LEARNER, RunDirectory

VERSIONS: Final = 100
POLL_S: Final = 0.7
LINE_EVERY_S: Final = 3.0
STALL_S: Final = 60.0
"""The demo has failed after this long without a step; chaos costs a tenth of it."""

_INTERRUPTED: Final = 128 + signal.SIGINT


def main() -> int:
    """Run the demo; return the exit code."""
    arguments = _arguments()
    plan = Plan(seed=arguments.seed, versions=arguments.versions, has_chaos=arguments.chaos)
    directory = RunDirectory.make(arguments.dir, f"demo-{{stamp}}-seed{plan.seed}")
    console = Console(highlight=False)
    try:
        outcome = asyncio.run(_run(plan, directory, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; every process has ended")
        return _INTERRUPTED
    except ChildError as error:
        console.print(f"the demo failed: {error}\nits files: {directory.root}", markup=False)
        return 1
    _save(outcome, directory)
    console.print(summary.render(outcome))
    console.print(
        f"{'kept every promise' if outcome.is_success else 'broke a promise'} in "
        f"{outcome.elapsed_s:.0f} s; summary.json, plot.png, divergence.png and logs are in {directory.root}"
    )
    return 0 if outcome.is_success else 1


async def _run(plan: Plan, directory: RunDirectory, console: Console) -> summary.Outcome:
    began_s = time.monotonic()
    with View(
        console, goal=str(plan.versions), samplers=SAMPLERS, began_s=began_s, line_every_s=LINE_EVERY_S
    ) as view:
        async with Children(log_of=directory.log, environ=os.environ | ONE_THREAD_EACH) as children:
            return await children.guard(_demo(plan, directory, children, view, began_s=began_s))


async def _demo(
    plan: Plan, directory: RunDirectory, children: Children, view: View, *, began_s: float
) -> summary.Outcome:
    session = Session(plan, directory, children=children)
    view.say(f"run {directory.run_id} in {directory.root}")
    await session.begin(view.say)
    view.say("all processes serve; the first groups are sampled")
    chaos = Chaos(session, versions=plan.versions) if plan.has_chaos else None
    observer = session.observer(began_s=began_s)
    async with asyncio.TaskGroup() as strikes:

        def show(seen: Observation) -> None:
            view.show(seen)
            if chaos is not None and (fault := chaos.due(seen.version)):
                view.say(f"killing {fault.name} at version {seen.version}")
                strikes.create_task(chaos.strike(fault, version=seen.version))

        await session.watch(observer, show, poll_s=POLL_S, stall_s=STALL_S)
    seen = await observer.observe()
    view.say("the learner has made its last version")
    exit_codes = await session.drain()
    ledger = read_ledger(directory.ledger, run_id=directory.run_id)
    promises = promises_of_any_run(
        versions=plan.versions, steps=seen.steps, ledger=ledger, exit_codes=exit_codes
    )
    faults = tuple(chaos.faults) if chaos else ()
    return summary.Outcome(
        plan=plan,
        run_id=directory.run_id,
        elapsed_s=time.monotonic() - began_s,
        steps=seen.steps,
        ledger=ledger,
        scrapes=seen.scrapes,
        exit_codes=exit_codes,
        faults=faults,
        checks=(
            *promises_of_the_demo(seen.steps),
            *promises,
            *(evaluate(faults, seen) if chaos is not None else ()),
        ),
    )


def _save(outcome: summary.Outcome, directory: RunDirectory) -> None:
    document = json.dumps(summary.to_document(outcome), indent=2)
    (directory.root / "summary.json").write_text(document + "\n")
    if outcome.steps:
        plot(
            outcome.steps,
            directory.root / "plot.png",
            title=f"{outcome.run_id}: reward {reward_at_first(outcome.steps):.2f} to "
            f"{reward_at_last(outcome.steps):.2f} in {outcome.elapsed_s:.0f} s",
            samplers=SAMPLERS,
            promised=(REWARD_AT_FIRST, REWARD_AT_LAST),
            marks=[(fault.version, f"{fault.name} killed") for fault in outcome.faults],
        )
        plot_by_lag(outcome.scrapes.newest(LEARNER), outcome.steps, directory.root / "divergence.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of base model, prompts and sampling")
    parser.add_argument("--chaos", action="store_true", help="kill processes and damage frames meanwhile")
    parser.add_argument("--versions", type=int, default=VERSIONS, help="gradient steps; default: %(default)s")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where runs go; default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
