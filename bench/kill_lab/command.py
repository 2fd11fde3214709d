"""The command of ``bench.kills`` and ``bench.restores``: a run below a directory, a campaign, a summary."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from bench.kill_lab.campaign import describe
from bench.kill_lab.plan import Plan
from bench.kill_lab.stage import Stage
from deploy.runs.processes import ChildError, Children, children_below

Summary = dict[str, Any]


class Campaign(Protocol):
    """Something done to a run, and what came of it."""

    async def run(self) -> None: ...

    def summary(self) -> Summary: ...


async def run_campaign(
    plan: Plan,
    root: Path,
    campaign_of: Callable[[Any, Children], Campaign],
    *,
    stage_of: Callable[..., Stage] = Stage,
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
            campaign = campaign_of(stage, children)
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
    say(f"{describe(summary['violations'])}; its files: {root}")
    return 1 if summary["violations"] else 0


def parser(name: str, doc: str) -> argparse.ArgumentParser:
    """Return a parser with the options that both have."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=doc.partition("\n")[0])
    made.add_argument("--seed", type=int, default=0, help="of the model and of everything that is drawn")
    made.add_argument("--dir", type=Path, default=Path("runs"), help="where runs go; default: %(default)s")
    return made


def say(text: str) -> None:
    """Tell the person at the terminal."""
    print(text, file=sys.stderr, flush=True)
