"""Our step against the least a step can be and against TRL's: time and memory. One JSON line per figure.

    python -m bench.learner          10 minutes -> bench/results/learner.{md,jsonl}
    python -m bench.learner --quick  seconds, prints only

Every step of a shape is taken in turn, round after round, in one process on one thread, so that all meet
the same disturbances. A ratio is that of a step's time to bare's in the same round; given is the median
over rounds, and between which two values the middle half of them lay. Bare is there twice: what the
second says of itself is the noise. The process keeps memory that was freed, as torch keeps a GPU's;
otherwise a step's time is up to twice as long by page faults, most for those that need the most memory,
which is not ours.

    step, kind      which of bench/learner/steps.py, on which shape
    seconds         median by the clock; cpu_seconds: of the process, which others can hardly lengthen
    over_bare       ratio of times by the clock; cpu_over_bare: of the process's own. Bare and TRL's steps
                    take completions of one length, so there are none where lengths differ
    cpu_over_ours   likewise over `ours, grpo`
    peak_bytes      of one step, in a process of its own: bench/learner/memory.py
    gradient_norm   of the first step
    gradient_apart  length of `trl`'s or `ours, padded`'s gradient minus `ours, grpo`'s, over that of the
                    latter: the same loss
    tokens          that the step learns from; tokens_per_core_s: by cpu_seconds
    positions_over_distinct   positions that the layers read, over those that differ within a group, in
                    themselves or in what is before them
"""

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from bench.learner.memory import step_peak
from bench.learner.report import write_report
from bench.learner.steps import (
    Shape,
    Step,
    completion_tokens,
    distinct_positions,
    gradient_of,
    make_groups,
    positions_read,
    step_makers,
)
from bench.shared.measure import in_turns, keep_freed_memory, over, ratio

RESULTS: Final = Path(__file__).parents[1] / "results"

SHAPES: Final = (
    Shape("64 tokens of vocabulary", 64, 64, 2, 8, 8, 8, 56, rounds=31),
    Shape("the same, half as long", 64, 64, 2, 8, 8, 8, 24, rounds=41),
    Shape("8192, width 256, 4 layers", 8192, 256, 4, 4, 4, 8, 56, rounds=9),
    Shape("32 768, width 256, 4 layers", 32_768, 256, 4, 4, 8, 8, 56, rounds=5),
    # Most of a step is layers and not the head, as it is for a model of 135 M parameters.
    Shape("word problems", 8192, 256, 8, 16, 8, 60, 40, rounds=5, least_tokens=(20, 5)),
    Shape("word problems behind 1000 tokens", 8192, 256, 8, 2, 8, 1060, 40, rounds=3, least_tokens=(1020, 5)),
)
QUICK_SHAPES: Final = (
    Shape("64", 64, 32, 1, 2, 4, 4, 8, rounds=3),
    Shape("64, uneven", 64, 32, 1, 2, 4, 12, 8, rounds=3, least_tokens=(4, 1)),
)

SAME_LOSS: Final = frozenset({"trl", "ours, padded"})
"""Steps that have the loss of `ours, grpo`."""

GRADIENTS_APART: Final = 1e-4
"""Steps whose gradients are further apart have not the same loss, and no ratio of theirs says anything."""


def compare(shape: Shape) -> Iterator[dict[str, Any]]:
    """Return a line for every step of a shape, but for its peak.

    Raises:
        ValueError: the gradients of steps with one loss differ.
    """
    groups = make_groups(shape)
    steps = {name: make(shape, groups) for name, make in step_makers(shape).items()}
    apart = _gradients_apart(steps)
    norms = {name: step() for name, step in steps.items()}
    positions = {name: positions_read(step) for name, step in steps.items()}
    wall, cpu = _times(steps, shape.rounds)
    tokens, distinct = completion_tokens(groups), distinct_positions(groups)
    for name in steps:
        seconds, cpu_seconds = statistics.median(wall[name]), statistics.median(cpu[name])
        yield {
            "kind": shape.name,
            "step": name,
            "vocabulary": shape.vocabulary,
            "tokens": tokens,
            "positions_over_distinct": round(positions[name] / distinct, 3),
            "rounds": shape.rounds,
            "seconds": round(seconds, 5),
            "cpu_seconds": round(cpu_seconds, 5),
            **over(wall, name, "bare", "over_bare"),
            **over(cpu, name, "bare", "cpu_over_bare"),
            "cpu_over_ours": ratio(cpu[name], cpu["ours, grpo"])[0],
            "tokens_per_second": round(tokens / seconds),
            "tokens_per_core_s": round(tokens / cpu_seconds),
            "gradient_norm": round(norms[name], 6),
            "gradient_apart": apart.get(name),
        }


def _gradients_apart(steps: Mapping[str, Step]) -> dict[str, float]:
    ours, apart = gradient_of(steps["ours, grpo"]), {}
    for name in steps.keys() & SAME_LOSS:
        apart[name] = float((gradient_of(steps[name]) - ours).norm() / ours.norm())
        if not apart[name] < GRADIENTS_APART:
            raise ValueError(
                f"the gradients of ours and {name} are {apart[name]:.2g} of their length apart: not one loss"
            )
    return apart


def _times(steps: Mapping[str, Step], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of every step in every round, by the clock and of the process."""
    gc.collect()
    gc.freeze()  # models and trainers: or each collection would go through them, in whoever's step it falls
    took = in_turns(steps, rounds, _timed)
    gc.unfreeze()
    wall, cpu = ({name: [each[clock] for each in took[name]] for name in took} for clock in (0, 1))
    return wall, cpu


def _timed(step: Callable[[], object]) -> tuple[float, float]:
    gc.collect()
    started, processor = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - started, time.process_time() - processor


def main(arguments: Sequence[str]) -> None:
    """Print the lines, and write the report unless in quick mode."""
    parser = argparse.ArgumentParser(prog="python -m bench.learner", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small shape, no report: seconds")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than 1 needs a quiet machine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the report")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    if importlib.util.find_spec("trl") is None:
        print("TRL's steps are left out: pip install heterorl-node[bench]", file=sys.stderr)
    lines = []
    shapes = QUICK_SHAPES if options.quick else SHAPES
    for shape in shapes:
        for line in compare(shape):
            peak_bytes = step_peak(shape, line["step"], threads=options.threads)
            lines.append({**line, "peak_bytes": peak_bytes, "threads": options.threads})
            print(json.dumps(lines[-1]), flush=True)
            if not options.quick:
                write_report(lines, options.results)  # what is there already, if it is killed


if __name__ == "__main__":
    main(sys.argv[1:])
