"""``python -m bench.bad_prompts``: how much of its speed a run keeps when one prompt in twenty is bad.

Each run is coordinator, learner and two samplers, processes of their own on this machine. A run with bad
prompts is compared with one without that runs beside it, so that both have the same machine at the same time,
from the first step on: the time in which the bad prompts are found out is part of it. Prints a line for each
pair and a JSON summary; exits with 1 if a run kept less than ``PROMISED`` of the speed.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench import bad_prompt_tasks as tasks
from bench.attack_lab.stage import SAMPLERS, Stage
from bench.demo_run import demo_model
from deploy.runs.processes import ChildError, children_below
from deploy.runs.records import StepTail
from deploy.runs.run_directory import LEARNER, Section
from node.commands.status.status_command import fetch_status

PROMISED: Final = 0.9

NONE: Final = "none"

KINDS: Final[Mapping[str, type[tasks.GoodPrompts]]] = {
    NONE: tasks.GoodPrompts,
    "too_long": tasks.TooLong,
    "prompt_raises": tasks.PromptRaises,
    "prompt_hangs": tasks.PromptHangs,
    "grader_raises": tasks.GraderRaises,
    "grader_hangs": tasks.GraderHangs,
}
DEFAULT_KINDS: Final = ("too_long", "prompt_raises", "grader_raises", "grader_hangs")

WALL_LIMIT_S: Final = 2.0
"""Limit after which a hanging task is killed: a hundred times what a group takes here."""

CHANGES: Final[Mapping[str, Section]] = {
    "coordinator": {"max_staleness_versions": 64, "concurrency_groups": 64, "buffer_groups": 64},
    "coordinator.evaluation": {"every_versions": 0},
    # Next to nothing: how fast the run goes must not depend on what it learns.
    "learner": {"learning_rate": 1e-9},
    "sampler": {"concurrency_groups": 8, "grader_wall_limit_s": WALL_LIMIT_S},
}

READY_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    kind: str
    groups: int
    seconds: float
    bad_prompts: int
    """Found out by its end."""
    reasons: tuple[str, ...]
    slots: dict[str, int]

    @property
    def groups_per_second(self) -> float:
        return self.groups / self.seconds


async def measure(
    kind: str, root: Path, model: Path, *, seconds: float, both_wait: asyncio.Barrier
) -> Measured:
    """Run below ``root``, which is made, and count what was trained on.

    Args:
        both_wait: Passed by both runs once only their learners are missing.

    Raises:
        ChildError: a process ended by itself, or did not begin to train.
    """
    async with children_below(root) as children:
        stage = Stage(root, children=children, task=KINDS[kind], changes=CHANGES)
        await stage.lead(model)
        async with asyncio.TaskGroup() as starting:
            for name in SAMPLERS:
                starting.create_task(stage.start(name, environ={}))
        await both_wait.wait()
        await stage.launch(LEARNER, environ={})

        async def trained() -> Measured:
            tail = StepTail(stage.directory.step_log)
            deadline_s = time.monotonic() + READY_TIMEOUT_S
            while not tail.read():
                if time.monotonic() > deadline_s:
                    raise children.failure(LEARNER, f"made no step within {READY_TIMEOUT_S:.0f} s")
                await asyncio.sleep(_POLL_S)
            await asyncio.sleep(seconds)
            status = await fetch_status(f"127.0.0.1:{stage.ports.members}", stage.operator())
            began_s = tail.steps[0].at_s
            groups = sum(len(step.groups) for step in tail.read() if step.at_s <= began_s + seconds)
            reasons = tuple(sorted({bad.reason for bad in status.bad_prompts}))
            return Measured(kind, groups, seconds, status.bad_prompts_total, reasons, status.slots)

        return await children.guard(trained())


def main() -> int:
    """Measure, print, and return the exit code."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="heterorl-bad-prompts-") as directory:
        try:
            pairs = asyncio.run(_measure_pairs(arguments.kinds, Path(directory), seconds=arguments.seconds))
        except ChildError as error:
            _say(f"a process failed: {error}")
            return 1
    ratios = {bad.kind: round(bad.groups_per_second / good.groups_per_second, 3) for good, bad in pairs}
    is_kept = all(ratio >= PROMISED for ratio in ratios.values())
    runs = [[asdict(one) for one in pair] for pair in pairs]
    print(json.dumps({"ratio": ratios, "promised": PROMISED, "is_kept": is_kept, "pairs": runs}, indent=2))
    return 0 if is_kept else 1


async def _measure_pairs(
    kinds: Sequence[str], root: Path, *, seconds: float
) -> list[tuple[Measured, Measured]]:
    model = await demo_model(root, accuracy=0.2)
    pairs = []
    for kind in kinds:
        both_wait = asyncio.Barrier(2)
        names = {one: f"{kind}-{one}".replace("_", "-") for one in (NONE, kind)}
        runs = (
            measure(one, root / name, model, seconds=seconds, both_wait=both_wait)
            for one, name in names.items()
        )
        good, bad = await asyncio.gather(*runs)
        pairs.append((good, bad))
        _say(
            f"{kind:14} {bad.groups_per_second:6.1f} groups/s, without {good.groups_per_second:6.1f}: "
            f"{bad.groups_per_second / good.groups_per_second:.1%}; "
            f"{bad.bad_prompts} bad prompts found: {', '.join(bad.reasons)}"
        )
    return pairs


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bad_prompts", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=[kind for kind in KINDS if kind != NONE],
        default=DEFAULT_KINDS,
        help="ways of being bad; default: %(default)s",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each pair; default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
