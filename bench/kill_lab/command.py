"""Base of the commands that harm a run: a run below a directory, a campaign, a summary."""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from bench.kill_lab.plan import Plan
from bench.kill_lab.stage import Stage
from bench.shared.demo_run import say
from deploy.runs.processes import ChildError, children_below
from deploy.runs.records import StepTail
from deploy.runs.run_directory import LEARNER

Summary = dict[str, Any]


class Campaign:
    """Something done to a run, and what came of it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._draw = random.Random(stage.plan.seed)
        self._steps = StepTail(stage.state(LEARNER) / "steps.jsonl")
        self.broken: list[str] = []
        """Promises that were not kept."""

    @property
    def version(self) -> int:
        """Newest step in the learner's own log."""
        steps = self._steps.read()
        return steps[-1].version if steps else 0

    async def run(self) -> None:
        """Do it, drain the run, and judge it."""
        raise NotImplementedError

    def summary(self) -> Summary:
        """Return what there is to say; ``violations`` are in it."""
        raise NotImplementedError


async def run_campaign(
    plan: Plan,
    root: Path,
    campaign_of: Callable[[Any], Campaign],
    *,
    stage_of: Callable[..., Stage],
) -> Summary:
    """Run a campaign below ``root``, which is made, and return its summary.

    Raises:
        ChildError: a process ended by itself.
    """
    began_s = time.monotonic()
    async with children_below(root) as children:
        stage = stage_of(plan, root, children=children)

        async def work() -> Summary:
            await stage.begin()
            say(f"{', '.join(plan.daemons)} serve after {time.monotonic() - began_s:.0f} s")
            campaign = campaign_of(stage)
            await campaign.run()
            return campaign.summary()

        try:
            summary = await children.guard(work())
        finally:
            await stage.close()
    return summary | {"elapsed_s": round(time.monotonic() - began_s, 1)}


def main(name: str, directory: Path, seed: int, work: Callable[[Path], Coroutine[Any, Any, Summary]]) -> int:
    """Run ``work`` in a directory of its own, print and keep its summary, and return the exit code."""
    root = (directory / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}").resolve()
    try:
        summary = asyncio.run(work(root))
    except ChildError as error:
        say(f"a process failed: {error}\nits files: {root}")
        return 1
    print(json.dumps(summary, indent=2))
    (root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    violations = [f"VIOLATED: {what}" for what in summary["violations"]] or ["every promise was kept"]
    say("\n".join([*violations, f"its files: {root}"]))
    return 1 if summary["violations"] else 0


def parser(name: str, doc: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all of them have."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=doc.partition("\n")[0])
    made.add_argument("--seed", type=int, default=0, help="of the model and of everything that is drawn")
    made.add_argument("--dir", type=Path, default=Path("runs"), help="where runs go; default: %(default)s")
    return made
