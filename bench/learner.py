"""Our step against the least a step can be and against TRL's: time and memory. One JSON line per figure.

    python -m bench.learner          some minutes -> bench/results/learner.{md,jsonl,png}

Every step of a shape is taken in turn, round after round, in one process on one thread, so that all meet
the same disturbances; a ratio is the median over rounds of a step's time over bare's in the same round.
Peaks are of resident memory during one step above what was resident before it (Linux only).

    step, kind      which of bench/learner_steps.py, on which shape
    seconds         median by the clock; cpu_seconds: of the thread's own time, which others cannot lengthen
    over_bare       ratio of times by the clock; cpu_over_bare: of the thread's own
    peak_bytes      of one step
    gradient_norm   of the first step: the same for `ours, grpo` and `trl`, which have the same loss

A second table is about token_logprob alone, forward and backward, as the vocabulary grows.
"""

import argparse
import ctypes
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from bench.learner_report import write_report
from bench.learner_steps import Shape, Step, make_groups, own_steps
from bench.measure import peak
from learner.token_logprob import CHUNK_LOGITS, token_logprob

RESULTS: Final = Path(__file__).parent / "results"

SHAPES: Final = (
    Shape("64 tokens of vocabulary", 64, 64, 2, 8, 8, 8, 56, rounds=11),
    Shape("the same, half as long", 64, 64, 2, 8, 8, 8, 24, rounds=15),
    Shape("8192", 8192, 64, 2, 8, 8, 8, 56, rounds=4),
    Shape("32 768", 32_768, 64, 2, 8, 4, 8, 56, rounds=3),
    Shape("8192, wider", 8192, 256, 4, 4, 4, 8, 56, rounds=3),
    Shape("8192, long", 8192, 64, 2, 1, 4, 8, 1016, rounds=3),
)
QUICK_SHAPES: Final = (Shape("64", 64, 32, 1, 2, 4, 4, 8, rounds=3),)

VOCABULARIES: Final = (8192, 32_768, 131_072)
LOGPROB_TOKENS: Final = 4096
LOGPROB_WIDTH: Final = 64

_MMAP_THRESHOLD: Final = -3
"""glibc's M_MMAP_THRESHOLD. Fixed at 1 MiB, large tensors go back to the system when they are freed."""


def compare(shape: Shape) -> Iterator[dict[str, Any]]:
    """Give a line for every step of a shape."""
    groups = make_groups(shape)
    steps = own_steps(shape, groups)
    try:
        from bench.learner_trl import trl_steps

        steps += trl_steps(shape, groups)
    except ImportError as error:
        yield {"kind": shape.name, "step": "trl", "skipped": f"{error}: pip install heterorl-node[bench]"}
    norms = [step() for step in steps]
    wall, cpu = _times(steps, shape.rounds)
    tokens = shape.rows * shape.completion_tokens
    for number, step in enumerate(steps):
        seconds = statistics.median(wall[number])
        yield {
            "kind": shape.name,
            "step": step.name,
            "vocabulary": shape.vocabulary,
            "tokens": tokens,
            "seconds": round(seconds, 5),
            "cpu_seconds": round(statistics.median(cpu[number]), 5),
            "over_bare": round(_ratio(wall[number], wall[0]), 4),
            "cpu_over_bare": round(_ratio(cpu[number], cpu[0]), 4),
            "tokens_per_second": round(tokens / seconds),
            "peak_bytes": _peak_of(step),
            "gradient_norm": round(norms[number], 6),
        }


def _times(steps: Sequence[Step], rounds: int) -> tuple[list[list[float]], list[list[float]]]:
    wall: list[list[float]] = [[] for _ in steps]
    cpu: list[list[float]] = [[] for _ in steps]
    for round_number in range(rounds):
        for offset in range(len(steps)):
            number = (round_number + offset) % len(steps)  # nobody is always the first
            gc.collect()
            started = time.perf_counter(), time.thread_time()
            steps[number]()
            wall[number].append(time.perf_counter() - started[0])
            cpu[number].append(time.thread_time() - started[1])
    return wall, cpu


def _ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def _peak_of(step: Step) -> int | None:
    _return_freed_memory()
    return peak(step)[0]


def _return_freed_memory() -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 20)
        libc.malloc_trim(0)


def logprob_memory(vocabulary: int) -> Iterator[dict[str, Any]]:
    """Give the peak of logprobs and their gradients, all logits at once and in chunks."""
    hidden = torch.randn(LOGPROB_TOKENS, LOGPROB_WIDTH, requires_grad=True)
    weight = torch.randn(vocabulary, LOGPROB_WIDTH, requires_grad=True)
    target_ids = torch.randint(vocabulary, (LOGPROB_TOKENS,))
    ones = torch.ones(LOGPROB_TOKENS)

    def in_chunks() -> None:
        token_logprob(hidden, weight, None, target_ids=target_ids, temperature=ones).sum().backward()  # type: ignore[no-untyped-call]

    def at_once() -> None:
        logprob = torch.log_softmax(hidden @ weight.T, dim=-1)
        logprob.gather(-1, target_ids[:, None]).sum().backward()  # type: ignore[no-untyped-call]

    for name, run in (("in chunks", in_chunks), ("all at once", at_once)):
        line = {"logprobs": name, "vocabulary": vocabulary, "tokens": LOGPROB_TOKENS}
        needed = 3 * LOGPROB_TOKENS * vocabulary * 4
        if name == "all at once" and needed > _available_bytes() // 2:
            yield {**line, "skipped": f"needs some {needed >> 30} GiB"}
            continue
        hidden.grad = weight.grad = None
        _return_freed_memory()
        started = time.thread_time()
        peak_bytes, _ = peak(run)
        gradient_bytes = 4 * (hidden.numel() + weight.numel())
        yield {
            **line,
            "cpu_seconds": round(time.thread_time() - started, 3),
            "peak_bytes": peak_bytes,
            "gradient_bytes": gradient_bytes,
            "logits_bytes": None if peak_bytes is None else peak_bytes - gradient_bytes,
            "chunk_bytes": 4 * min(CHUNK_LOGITS, LOGPROB_TOKENS * vocabulary),
        }


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(line.split()[1])


def main(arguments: Sequence[str]) -> None:
    """Print the lines, and write the report unless in quick mode."""
    parser = argparse.ArgumentParser(prog="python -m bench.learner", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small shape, no report: seconds")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than 1 needs a quiet machine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the report")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    lines = []
    vocabularies = (1024,) if options.quick else VOCABULARIES
    shapes = QUICK_SHAPES if options.quick else SHAPES
    for line in itertools.chain(
        (line for vocabulary in vocabularies for line in logprob_memory(vocabulary)),
        (line for shape in shapes for line in compare(shape)),
    ):
        lines.append({**line, "threads": options.threads})
        print(json.dumps(lines[-1]), flush=True)
        if not options.quick:
            write_report(lines, options.results)  # what is there already, if it is killed


if __name__ == "__main__":
    main(sys.argv[1:])
