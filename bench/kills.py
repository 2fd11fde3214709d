"""``python -m bench.kills --kills 100 --seed N``: kill -9 at random, at the worst moments, of a real run.

    run: coordinator, learner, relay, samplers over mutual TLS and slow links
    kill --> look at the disk --> start again --> the run must go on --> next kill ... --> drain --> judge

Sampler, relay and learner are killed while versions are published, fetched, staged and applied: at what they
write, at any time, and while they start. An independent witness reads signatures, checkpoints, copies and
logs, and says whether anyone served weights that were not signed, went back, or lost or doubled work. Prints
its progress on standard error and a JSON summary; exits with 1 if a promise was broken.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from bench.kill_lab.campaign import Campaign, describe
from bench.kill_lab.plan import Plan
from bench.kill_lab.stage import Stage
from bench.kill_lab.witness import Witness
from deploy.runs.processes import ChildError, Children
from node.identity.run_description import RunDescription

REPOSITORY: Final = Path(__file__).parents[1]

ENVIRON: Final = {
    # One thread each: all processes share the machine.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # Samplers import the task from here.
    "PYTHONPATH": str(REPOSITORY),
}


async def run(plan: Plan, root: Path) -> dict[str, Any]:
    """Run the whole campaign below ``root``, which is made, and give its summary.

    Raises:
        ChildError: a process ended by itself.
    """
    began_s = time.monotonic()
    logs = {name: root / "logs" / f"{name}.log" for name in plan.daemons}
    async with Children(
        log_of=lambda name: root / "logs" / f"{name}.log", environ=os.environ | ENVIRON
    ) as children:
        stage = Stage(plan, root, children=children)

        async def campaign() -> dict[str, Any]:
            await stage.begin()
            _say(f"{', '.join(plan.daemons)} serve after {time.monotonic() - began_s:.0f} s")
            public_key = RunDescription.load(stage.run_file).learner_public_key
            witness = Witness(stage, public_key=public_key, log_of=logs)
            campaign = Campaign(stage, witness, say=_say)
            await campaign.run()
            return campaign.summary()

        summary = await children.guard(campaign())
    return summary | {"elapsed_s": round(time.monotonic() - began_s, 1)}


def main() -> int:
    """Run, print, and give the exit code."""
    arguments = _arguments()
    samplers = tuple(f"sampler-{number + 1}" for number in range(arguments.samplers))
    plan = Plan(arguments.kills, arguments.seed, samplers)
    root = (arguments.dir / f"kills-{time.strftime('%Y%m%d-%H%M%S')}-seed{plan.seed}").resolve()
    try:
        summary = asyncio.run(run(plan, root))
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
    parser = argparse.ArgumentParser(prog="python -m bench.kills", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how many; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the victims and the moments")
    parser.add_argument("--samplers", type=int, default=2, help="how many take part; default: %(default)s")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where runs go; default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
