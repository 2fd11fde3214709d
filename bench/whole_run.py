"""One learner and one sampler of a large model on the same GPU, as daemons. One JSON line.

    python -m bench.whole_run                               half a billion parameters, two minutes on an H100
    python -m bench.whole_run --size tiny --device cpu --seconds 10

    coordinator, learner and sampler are processes over mutual TLS on this machine, the model is random

    sampler_tokens_per_s   of finished groups, from the first step to the end
    trained_tokens_per_s   of the completions in steps, over the same time
    step_s                 of the learner, journal and waiting left out; median, as all that follows
    groups_wait_s          that the learner waited for a batch: the sampler is what limits the run
    masters_wait_s         that steps waited until a version's words had been read
    publish_s              from masters to signed and stored for upload
    held_s                 from the end of a step until the sampler sampled from its version
    held_versions          versions of which that was seen; a later one may overtake one
    delta_bytes            mean over versions received, keyframes left out; model_bytes is a whole version
    gpu_peak_bytes         of the whole device, by nvidia-smi

The first step is left out: it allocates, and compiles.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.random_model import SIZES, made_model
from deploy.runs.observation import Metrics, scrape
from deploy.runs.processes import ChildError, Children
from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, Section
from deploy.runs.run_session import RunSession

SAMPLER: Final = "sampler-1"
TASK: Final = "even_numbers"
READY_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.05


def configurations(
    arguments: argparse.Namespace, directory: RunDirectory, ports: Ports
) -> Mapping[str, Mapping[str, Section]]:
    """Return the configuration of each daemon: process -> section -> key -> value."""
    model = {
        "model_dir": str(directory.model),
        "device": arguments.device,
        "compute_dtype": arguments.compute_dtype,
    }
    roles: dict[str, tuple[str, Section]] = {
        COORDINATOR: (
            "coordinator",
            {
                "listen": f"127.0.0.1:{ports.members}",
                "enrolment_listen": f"127.0.0.1:{ports.enrolment}",
                "task": TASK,
                "group_size": arguments.group_size,
                "batch_groups": arguments.batch_groups,
                "max_new_tokens": arguments.new_tokens,
                "max_staleness_versions": 16,
            },
        ),
        LEARNER: (
            "learner",
            {
                **model,
                "learning_rate": arguments.learning_rate,
                "micro_batch_tokens": arguments.micro_batch_tokens,
                "buffer_groups": 4 * arguments.batch_groups,
                # Checkpoints are 12 bytes a parameter, and measured by bench.learner_life.
                "checkpoint_every_versions": 10_000,
                "checkpoint_every_s": 1e6,
                "samples_every_versions": 0,
            },
        ),
        SAMPLER: (
            "sampler",
            {**model, "engine": "torch", "seed": 0, "concurrency_groups": 2 * arguments.batch_groups},
        ),
    }
    return {
        name: {
            **directory.place(name, ports, dials=None if name == COORDINATOR else ports.members),
            role: section,
        }
        for name, (role, section) in roles.items()
    }


async def measured(arguments: argparse.Namespace, directory: RunDirectory) -> dict[str, Any]:
    """Run the daemons and return the line.

    Raises:
        ChildError: a process did not start, or ended.
    """
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # or the daemons would go on
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "proto"), *sys.path[1:]]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    async with Children(log_of=directory.log, environ=environ, stop_timeout_s=5.0) as children:
        session = RunSession(
            directory, enrolled=(SAMPLER,), children=children, ready_timeout_s=READY_TIMEOUT_S
        )
        return await children.guard(_measured(arguments, directory, session))


async def _measured(
    arguments: argparse.Namespace, directory: RunDirectory, session: RunSession
) -> dict[str, Any]:
    began_s = time.monotonic()
    await session.make_run(configurations(arguments, directory, session.ports))
    await session.start(COORDINATOR, environ={})
    await session.let_in(SAMPLER)
    of_sampler = {
        "HETERORL_SAMPLER__CUSTOM_TASKS": json.dumps({TASK: "bench.even_numbers:EvenNumbers"}),
        "HETERORL_SAMPLER__ENGINE_OPTIONS": json.dumps({"memory_bytes": arguments.cache_bytes}),
    }
    async with asyncio.TaskGroup() as group:
        group.create_task(session.start(LEARNER, environ={}))
        group.create_task(session.start(SAMPLER, environ=of_sampler))
    ready_s = time.monotonic() - began_s
    end_s = time.monotonic() + arguments.longest_s
    while not _steps(directory) and time.monotonic() < end_s:
        await session.wait_for_last_step(timeout_s=POLL_S)
    first = await _scrapes(session)
    held_at_s: dict[int, float] = {}
    looked_s = first_s = time.monotonic()
    gpu_bytes = 0
    while time.monotonic() < min(end_s, first_s + arguments.seconds):
        metrics = await scrape(session.ports.telemetry[SAMPLER]) or Metrics()
        held = int(metrics.total("heterorl_sampler_held_version"))
        held_at_s.setdefault(held, time.time())
        if time.monotonic() > looked_s + 1:
            gpu_bytes, looked_s = max(gpu_bytes, await asyncio.to_thread(_gpu_bytes)), time.monotonic()
        await session.wait_for_last_step(timeout_s=POLL_S)
    took_s, last = time.monotonic() - first_s, await _scrapes(session)
    steps = _steps(directory)[1:]
    waits = {
        step["version"]: held_at_s[step["version"]] - step["at_s"]
        for step in steps
        if step["version"] in held_at_s
    }

    def more(name: str, metric: str, **labels: str) -> float:
        return last[name].total(metric, **labels) - first[name].total(metric, **labels)

    moved = {
        kind: more(SAMPLER, "heterorl_node_transfer_bytes_total", kind=kind, direction="in")
        for kind in ("delta", "keyframe")
    }
    followed = last[SAMPLER].total("heterorl_sampler_held_version") - first[SAMPLER].total(
        "heterorl_sampler_held_version"
    )
    return {
        "size": arguments.size,
        "device": arguments.device,
        "model_bytes": (directory.model / "model.safetensors").stat().st_size,
        "ready_s": round(ready_s, 1),
        "measured_s": round(took_s, 1),
        "steps": len(steps),
        "sampler_tokens_per_s": round(more(SAMPLER, "heterorl_sampler_tokens_total") / took_s),
        "decode_steps_per_s": round(more(SAMPLER, "heterorl_sampler_decode_steps_total") / took_s, 2),
        "trained_tokens_per_s": round(sum(step["tokens"] for step in steps) / took_s),
        **{
            name: _median(step[name] for step in steps if step.get(name) is not None)
            for name in ("step_s", "groups_wait_s", "masters_wait_s", "journal_s", "publish_s", "tokens")
        },
        "kl_nats": _median(step["kl_nats"] for step in steps),
        "staleness_mean_versions": _median(step["staleness_mean_versions"] for step in steps),
        "reward_first_last": [round(step["reward_mean"], 4) for step in (steps[:1] + steps[-1:])],
        "held_s": _median(waits.values()),
        "held_s_longest": round(max(waits.values(), default=float("nan")), 3),
        "held_versions": len(waits),
        "versions_followed": int(followed),
        "delta_bytes": round(moved["delta"] / followed) if followed else None,
        "keyframe_bytes_in": round(moved["keyframe"]),
        "gpu_peak_bytes": gpu_bytes,
    }


async def _scrapes(session: RunSession) -> dict[str, Metrics]:
    return {name: await scrape(port) or Metrics() for name, port in session.ports.telemetry.items()}


def _steps(directory: RunDirectory) -> list[dict[str, Any]]:
    if not directory.step_log.exists():
        return []
    whole, _, _ = directory.step_log.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _gpu_bytes() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    printed = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return int(printed[0]) << 20 if printed and printed[0].isdigit() else 0


def _median(values: Any) -> float | None:
    every = list(values)
    return round(statistics.median(every), 4) if every else None


def main(given: Sequence[str] | None = None) -> int:
    """Print the line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.whole_run", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compute-dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure, after the first step")
    parser.add_argument("--longest-s", type=float, default=300.0, help="from the start of all processes")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--batch-groups", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--cache-bytes", type=int, default=16 << 30, help="for the sampler's keys and values")
    parser.add_argument("--dir", type=Path, help="where the run goes; without it a temporary directory")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as temporary:
        directory = RunDirectory((arguments.dir or Path(temporary) / "whole-run").resolve())
        directory.make_folders()
        made_model(directory.model, arguments.size, device=arguments.device)
        try:
            print(json.dumps(asyncio.run(measured(arguments, directory))), flush=True)
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
        except ChildError as error:
            print(f"the run failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
