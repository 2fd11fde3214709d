"""``python -m bench.restores --moments 50 --seed N``: older ledgers under a real run, restarts in any order.

Copies of the ledger are taken at random moments of a run of coordinator, learner, relay and sampler. Then,
again and again: the coordinator is stopped or killed, an older ledger is put back by hand, by a lost -wal,
or by the command, and the processes are restarted in a random order. Within two minutes the run must go on,
or say in its status what the ledger lacks and go on once that is mended. No slot may be trained on twice.
Prints its progress on standard error and a JSON summary; exits with 1 if a promise was broken.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.kill_lab.campaign import describe
from bench.kill_lab.plan import Plan
from bench.kill_lab.stage import Stage
from bench.kills import ENVIRON
from bench.restore_lab import Campaign
from deploy.runs.processes import ChildError, Children


async def run(plan: Plan, root: Path, *, moments: int) -> dict[str, Any]:
    """Run the whole campaign below ``root``, which is made, and return its summary.

    Raises:
        ChildError: a process ended by itself.
    """
    began_s = time.monotonic()
    async with Children(
        log_of=lambda name: root / "logs" / f"{name}.log", environ=os.environ | ENVIRON
    ) as children:
        stage = Stage(plan, root, children=children)

        async def campaign() -> dict[str, Any]:
            await stage.begin()
            _say(f"{', '.join(plan.daemons)} serve after {time.monotonic() - began_s:.0f} s")
            campaign = Campaign(stage, children, moments=moments, say=_say)
            await campaign.run()
            return campaign.summary()

        summary = await children.guard(campaign())
    return summary | {"elapsed_s": round(time.monotonic() - began_s, 1)}


def main() -> int:
    """Run, print, and return the exit code."""
    arguments = _arguments()
    plan = Plan(kills=0, seed=arguments.seed, samplers=("sampler-1",))
    root = (arguments.dir / f"restores-{time.strftime('%Y%m%d-%H%M%S')}-seed{plan.seed}").resolve()
    try:
        summary = asyncio.run(run(plan, root, moments=arguments.moments))
    except ChildError as error:
        _say(f"a process failed: {error}\nits files: {root}")
        return 1
    print(json.dumps(summary, indent=2))
    (root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _say(f"{describe(summary['violations'])}; its files: {root}")
    return 1 if summary["violations"] else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.restores", description=__doc__.partition("\n")[0])
    parser.add_argument("--moments", type=int, default=50, help="how many restores; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the copies and the orders")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where runs go; default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
