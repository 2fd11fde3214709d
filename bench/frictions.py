"""Objectives as a second line: how much each loses where nobody checks what actors hand in.

    python -m bench.frictions [--seeds 8]           -> bench/results/frictions.jsonl

Each method runs with its settings of ``bench/results/staleness_frozen.json``, or as published if it has none
there (`dg`; its best setting there too), on tasks of the staleness laboratory, under each friction alone.
A line is a finished cell, and a run that was cut off goes on where it was; delete the file to begin anew. In
the tables a score is the mean of the last three of 25 evaluations, in %, on held-out prompts, no friction.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from scipy import stats  # type: ignore[import-untyped]

from bench.friction_tasks import FRICTIONS, FrictionTask
from bench.staleness import DATA, FROZEN, RECORD
from bench.staleness_lab.cells import Cell, Floats, Setting
from bench.staleness_lab.frozen import read_settings
from bench.staleness_lab.methods import DEFAULT, Method
from bench.staleness_lab.plan import Row, cell_of
from bench.staleness_lab.pool import TASKS, cache_data
from bench.staleness_lab.simulation import simulate
from bench.staleness_lab.statistics import CONFIDENCE, simultaneous
from bench.staleness_lab.tasks import Task

RESULTS: Final = RECORD / "frictions.jsonl"
METHODS: Final = {
    DEFAULT: DEFAULT,
    "dg": "dg",
    "dg, eta 2": "dg",
    "grpo": "grpo",
    "gepo": "gepo",
}
"""Names in the tables, and of the recipes."""
OWN_SETTINGS: Final = {"dg, eta 2": Setting(changes={"temperature": 2.0})}
"""The best of dg's nine when the laboratory tuned it; the frozen file leaves out what was not reported."""
PLACES: Final = (("codes8", 8), ("maze", 8), ("digits", 8), ("codes8", 0))
"""Tasks, and by how many versions every group is late."""
NONE: Final = "none"
LEARNED: Final = 0.5
"""Score whose first evaluation tells how fast a method takes up what it finds."""


@dataclass(frozen=True, slots=True)
class Line:
    """A finished cell."""

    task: str
    staleness: int
    friction: str
    method: str
    setting: str
    ends: tuple[float, ...]
    """Score at the end, one a seed."""
    starts: tuple[float, ...]
    learned: tuple[int | None, ...]
    """First evaluated version with a score of ``LEARNED``, one a seed; None: never."""
    versions: int
    skipped: float
    """Share of steps whose gradient was not finite."""
    seconds: float
    """Processor time."""

    @property
    def key(self) -> tuple[str, int, str, str, str, int]:
        """Return what tells the cell from others."""
        return self.task, self.staleness, self.friction, self.method, self.setting, len(self.ends)


def main() -> int:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.frictions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = read_settings(FROZEN)
    lines = {line.key: line for line in read(arguments.out)}
    found = []
    for (task, staleness), friction, method in product(PLACES, FRICTIONS, METHODS):
        setting = OWN_SETTINGS.get(method) or settings.get(method, Setting())
        if not applies(friction, task):
            continue
        key = (task, staleness, friction, method, str(setting), arguments.seeds)
        if key not in lines:
            seeds = tuple(range(arguments.seeds))
            cell = cell_of(task, Row("fixed", staleness), METHODS[method], setting, seeds=seeds)
            cache_data([task], DATA)
            lines[key] = replace(run(cell, TASKS[task](DATA), friction), method=method)
            with arguments.out.open("a") as out:
                print(json.dumps(asdict(lines[key]), separators=(",", ":")), file=out)
            print(f"{task} {staleness} {friction} {method}", time.process_time(), file=sys.stderr)
        found.append(lines[key])
    print("\n".join(tables(found)))
    return 0


def read(path: Path) -> list[Line]:
    """Return the cells that are finished."""
    if not path.exists():
        return []
    return [Line(**json.loads(line, object_hook=_with_tuples)) for line in path.read_text().splitlines()]


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def applies(friction: str, task: str) -> bool:
    """Return whether a task has the friction: a policy that starts untrained cannot be flattened."""
    return FRICTIONS[friction].start_score is None or task not in ("maze", "digits")


def run(cell: Cell, task: Task, friction: str) -> Line:
    """Run a cell under a friction."""
    method = Method.named(cell.method, cell.setting.changes)
    outcome = simulate(cell, FrictionTask(task, FRICTIONS[friction]), method)
    at = np.linspace(0, cell.versions, len(outcome.scores[0])).round().astype(int)
    reached = [np.flatnonzero(np.array(curve) >= LEARNED) for curve in outcome.scores]
    return Line(
        task=cell.task,
        staleness=cell.staleness,
        friction=friction,
        method=cell.method,
        setting=str(cell.setting),
        ends=tuple(round(float(end), 4) for end in outcome.ends),
        starts=tuple(curve[0] for curve in outcome.scores),
        learned=tuple(int(at[each[0]]) if len(each) else None for each in reached),
        versions=cell.versions,
        skipped=outcome.skipped,
        seconds=outcome.seconds,
    )


def tables(lines: Sequence[Line]) -> Iterator[str]:
    """Yield two tables a place in Markdown: scores with changes, and who is ahead of the default."""
    for task, staleness in PLACES:
        here = {
            (one.friction, one.method): one for one in lines if (one.task, one.staleness) == (task, staleness)
        }
        if not here:
            continue
        frictions = [each for each in FRICTIONS if (each, DEFAULT) in here]
        some = here[NONE, DEFAULT]
        yield f"\n{task}, {staleness} versions late, {len(some.ends)} seeds, {some.versions} versions\n"
        yield "| | " + " | ".join(f"`{method}`" for method in METHODS) + " |"
        yield "|---" * (1 + len(METHODS)) + "|"
        for friction in frictions:
            entries = [_score(here[friction, method], here[NONE, method]) for method in METHODS]
            yield f"| {friction} | " + " | ".join(entries) + " |"
        yield f"\nminus `{DEFAULT}`, points; the intervals of this table hold together\n"
        rivals = [method for method in METHODS if method != DEFAULT]
        yield "| | " + " | ".join(f"`{method}`" for method in rivals) + " |"
        yield "|---" * (1 + len(rivals)) + "|"
        pairs = list(product(frictions, rivals))
        intervals = simultaneous(np.array([_ends(here[f, m]) - _ends(here[f, DEFAULT]) for f, m in pairs]))
        entries = [_change(each.mean, each.low, each.high) for each in intervals]
        for number, friction in enumerate(frictions):
            row = entries[number * len(rivals) : (number + 1) * len(rivals)]
            yield f"| {friction} | " + " | ".join(row) + " |"
    yield f"\n{len(lines)} cells, {sum(one.seconds for one in lines):.0f} s of processor time"


def paired(line: Line, without: Line) -> tuple[float, float, float]:
    """Return the mean change of the end on the same seeds, and an interval of Student's t."""
    change = _ends(line) - _ends(without)
    half = float(stats.sem(change) * stats.t.ppf((1 + CONFIDENCE) / 2, len(change) - 1))
    return float(change.mean()), float(change.mean()) - half, float(change.mean()) + half


def _score(line: Line, without: Line) -> str:
    reached = [at for at in line.learned if at is not None]
    speed = f"; .5 after {np.mean(reached):.0f}" if len(reached) == len(line.learned) else ""
    if reached and not speed:
        speed = f"; .5 in {len(reached)} of {len(line.learned)}"
    score = f"{100 * _ends(line).mean():.1f}"
    return score + ("" if line is without else f" ({_change(*paired(line, without))})") + speed


def _change(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _ends(line: Line) -> Floats:
    return np.array(line.ends, np.float64)


if __name__ == "__main__":
    sys.exit(main())
