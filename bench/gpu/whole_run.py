"""A coordinator, a learner and a sampler on one machine, and what a step waits for. One JSON line.

    python -m bench.gpu.whole_run --model DIR       SmolLM2-135M on word problems, on a GPU
    python -m bench.gpu.whole_run --device cpu      the demo's model on the demo's task

    tokens_per_s     of completions trained on, from the first step to the last
    groups_wait_s    that a step waited for its groups; median, as step_s, publish_s and staleness
    rewards          of the first step and of the last; seconds: between them

The first steps are left out of medians: they allocate, and compile.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.shared.demo_run import DemoRun, demo_model
from deploy.real.real_plan import TASK_FILES
from deploy.real.word_problems import write_word_problems
from deploy.runs.processes import ChildError, Children
from deploy.runs.run_directory import COORDINATOR, LEARNER, Section
from sampler.engines.engine_registry import has_vllm

SAMPLER: Final = "sampler-1"

WARM_STEPS: Final = 3

MEDIANS: Final = ("step_s", "groups_wait_s", "publish_s", "staleness_mean_versions")

GROUPS_AT_ONCE: Final = 64
"""Groups of 8 completions, as in the run that this one is compared with."""

VLLM_MEMORY: Final = 0.4
"""Share of the GPU's memory, of which the learner needs some too."""


def changes(arguments: argparse.Namespace, *, rows: Path) -> Mapping[str, Mapping[str, Section]]:
    """Return what is other than in the demo: process -> section -> key -> value."""
    engine = "vllm" if has_vllm(arguments.device) else "torch"
    learner: dict[str, object] = {"max_versions": arguments.versions, "device": arguments.device}
    sampler: dict[str, object] = {"device": arguments.device, "engine": engine}
    if arguments.model is None:
        return {LEARNER: {"learner": learner}, SAMPLER: {"sampler": sampler}}
    write_word_problems(rows)
    task = tomllib.loads(TASK_FILES["jsonl"].read_text())["coordinator"]
    options, data = task.pop("task_options"), task.pop("data")
    return {
        COORDINATOR: {
            "coordinator": {**task, "batch_groups": 32, "max_staleness_versions": 4},
            "coordinator.data": {**data, "file": str(rows)},
            "coordinator.task_options": options,
        },
        LEARNER: {"learner": {**learner, "learning_rate": 2e-5, "compute_dtype": "bfloat16", "threads": 4}},
        SAMPLER: {
            "sampler": {
                **sampler,
                "compute_dtype": "bfloat16",
                "concurrency_groups": GROUPS_AT_ONCE,
                "threads": 4,
            },
            "sampler.engine_options": {"memory_share": VLLM_MEMORY} if engine == "vllm" else {},
        },
    }


async def measured(arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Run the daemons until the learner has made its versions, and return the line.

    Raises:
        ChildError: a process did not start, or ended.
    """
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # or the daemons would go on
    model = arguments.model or await demo_model(root)
    repository = Path(__file__).parents[2]
    imports = os.pathsep.join(map(str, (repository, repository / "proto", *filter(None, sys.path))))
    environ = {**os.environ, "PYTHONPATH": imports, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    async with Children(log_of=lambda name: root / "logs" / f"{name}.log", environ=environ) as children:
        run = DemoRun(root / "run", children=children, samplers=[SAMPLER])
        given = changes(arguments, rows=root / "rows.jsonl")
        return await children.guard(_measured(run, model.resolve(), given))


async def _measured(run: DemoRun, model: Path, given: Mapping[str, Mapping[str, Section]]) -> dict[str, Any]:
    await run.make(model, given)
    await run.start_others()
    while not await run.wait_for_last_step(timeout_s=1.0):
        pass
    steps = [json.loads(line) for line in run.directory.step_log.read_text().splitlines()]
    seconds = steps[-1]["at_s"] - steps[0]["at_s"]
    return {
        "model": model.name,
        "engine": given[SAMPLER]["sampler"]["engine"],
        "steps": len(steps),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(step["tokens"] for step in steps[1:]) / seconds),
        **{name: _median(step.get(name) for step in steps[WARM_STEPS:]) for name in MEDIANS},
        "rewards": [round(steps[place]["reward_mean"], 4) for place in (0, -1)],
    }


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def main() -> int:
    """Print the line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.whole_run", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, help="directory of SmolLM2-135M")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--versions", type=int, default=40)
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="heterorl-whole-run-"))
    (root / "logs").mkdir()
    try:
        print(json.dumps(asyncio.run(measured(arguments, root))), flush=True)
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except ChildError as error:
        print(f"the run failed: {error}; logs are below {root}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
