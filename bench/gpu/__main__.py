"""Measure sampler, learner and a whole run on this machine's GPU. One JSON line per figure.

    python -m bench.gpu                          ten minutes -> bench/results/gpu.jsonl, as lines come
    python -m bench.gpu --model DIR              the whole run trains SmolLM2-135M, which lies there
    python -m bench.gpu --only learner whole-run
    python -m bench.gpu --size tiny              two minutes on a CPU: does the command itself work?

    run             sampler         bench.sampler: vLLM through us beside bare vLLM, and what versions cost
                    learner         bench.learner.device: as many tokens as the figures before it
                    learner-long    likewise: two rows of 16 384 tokens, layers computed again
                    learner-words   likewise: lengths of word problems, packed and padded
                    whole-run       bench.gpu.whole_run: our daemons, and how long a step waits for groups
    gpu             the card's name
    failed          what became of a run that did not end well; its log's last lines are with it

Each run has a time limit, and none needs another to succeed.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer
from typing import Any, Final

RESULTS: Final = Path(__file__).parents[1] / "results" / "gpu.jsonl"

GRACE_S: Final = 10.0
"""For the processes of a run that was told to end."""

_TAIL_BYTES: Final = 1000


@dataclass(frozen=True, slots=True)
class Measurement:
    """A command and the seconds that it may take."""

    limit_s: float
    command: str
    """Module and arguments, as a shell reads them."""


_WORDS: Final = "--group-size 8 --prompt-tokens 60 --completion-tokens 40 --least-tokens 20 5"

ON_GPU: Final[Mapping[str, Measurement]] = {
    "learner": Measurement(120, "bench.learner.device --size 0.5B"),
    "learner-words": Measurement(
        90, f"bench.learner.device --size 0.5B --groups 32 {_WORDS} --only 'ours, grpo' 'ours, padded'"
    ),
    "learner-long": Measurement(
        150,
        "bench.learner.device --size 0.6B --groups 1 --group-size 2 --completion-tokens 16352 "
        "--micro-batch-tokens 16384 --rematerialise layers --only 'ours, grpo' --rounds 3",
    ),
    "whole-run": Measurement(240, "bench.gpu.whole_run --device cuda --versions 40"),
    "sampler": Measurement(
        480,
        "bench.sampler --size 0.5B --device cuda --dtype bfloat16 --engines 'vllm bare' 'vllm own' "
        "--groups 32 64 --new-tokens 256 24 --every 5 --versions 3",
    ),
}
"""In the order of what they show for the time they take."""

_TINY_SIZE: Final = "--size tiny --device cpu --rounds 2"
_TINY_LOADS: Final = "--groups 2 4 --completions 2 --new-tokens 16 8 --every 1"

TINY: Final[Mapping[str, str]] = {
    "learner": f"{_TINY_SIZE} --groups 2 --group-size 2 --prompt-tokens 8 --completion-tokens 24",
    "learner-words": f"{_TINY_SIZE} --groups 2",
    "learner-long": f"{_TINY_SIZE} --prompt-tokens 8 --completion-tokens 120 --micro-batch-tokens 128",
    "whole-run": "--device cpu --versions 4",
    "sampler": f"{_TINY_SIZE} {_TINY_LOADS} --dtype float32 --engines torch",
}
"""Arguments that make the same commands small enough for a CPU."""


def measure(name: str, measurement: Measurement, *, log: Path) -> Iterator[dict[str, Any]]:
    """Run a command and return the JSON lines it prints, as they come; and one more if it fails."""
    command = [sys.executable, "-m", *shlex.split(measurement.command)]
    pipe, began_s = subprocess.PIPE, time.monotonic()
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=pipe, stderr=errors, text=True, start_new_session=True) as process,
    ):
        timer = Timer(measurement.limit_s, _end, [process])
        timer.start()
        try:
            assert process.stdout is not None
            for text in process.stdout:
                errors.write(text)
                with contextlib.suppress(ValueError):  # vLLM logs there, too
                    if isinstance(line := json.loads(text), dict):
                        yield {"run": name, **line}
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)
    if code:
        is_late = time.monotonic() - began_s > measurement.limit_s
        what = f"not done after {measurement.limit_s:g} s" if is_late else f"exit code {code}"
        yield {"run": name, "failed": what, "log": log.read_text()[-_TAIL_BYTES:]}


def _end(process: subprocess.Popen[str]) -> None:
    """End every process of a run's session."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


def card() -> str:
    """Return the name of the first GPU; without one, "CPU"."""
    if shutil.which("nvidia-smi") is None:
        return "CPU"
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    return names[0].strip() if names else "CPU"


def main(given: Sequence[str] | None = None) -> int:
    """Measure; return the exit code: 0 if no run failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=["gpu", "tiny"], default="gpu")
    parser.add_argument("--only", nargs="+", choices=ON_GPU, help="runs; without it all of them")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M's directory, for the whole run")
    parser.add_argument("--results", type=Path, help="file that lines are appended to")
    parser.add_argument("--logs", type=Path, help="folder for the runs' logs; without it a temporary one")
    arguments = parser.parse_args(given)
    is_tiny = arguments.size == "tiny"
    results = arguments.results or (None if is_tiny else RESULTS)
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="heterorl-gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    gpu, has_failed = card(), False
    for name, measurement in ON_GPU.items():
        if arguments.only and name not in arguments.only:
            continue
        command = measurement.command
        if is_tiny:
            command += f" {TINY[name]}"
        if name == "whole-run" and arguments.model is not None:
            command += f" --model {shlex.quote(str(arguments.model))}"
        for line in measure(name, replace(measurement, command=command), log=logs / f"{name}.log"):
            has_failed |= "failed" in line
            text = json.dumps({"run": line.pop("run"), "gpu": gpu, **line})
            print(text, flush=True)
            if results is not None:
                with results.open("a") as file:
                    file.write(text + "\n")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
