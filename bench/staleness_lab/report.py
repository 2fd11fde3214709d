"""The report: how it was done, and every cell beside the default, as Markdown."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.plan import DEFAULT, REPORT, Row
from bench.staleness_lab.results import Results
from bench.staleness_lab.statistics import Interval, simultaneous

_ABOUT: Final = """\
# The staleness laboratory

A policy of version v is trained on completions that the policy of version v - lag wrote. Prompts,
randomness, lags and faults are a matter of the seed alone, so methods are compared seed by seed. All have
the same Adam, the same bound on the gradient norm, and no KL penalty. A run ends at the mean of its last
three of 25 evaluations on held-out prompts.

Settings, tasks, rows and seeds were frozen in {commit}, before any report task had run off policy.
{finished} of {cells} cells have run: {hours:.1f} processor hours.
"""


def write_report(path: Path, cells: Sequence[Cell], results: Results, *, commit: str) -> None:
    """Write what the finished cells show."""
    finished = results.of(cells)
    about = _ABOUT.format(
        commit=f"commit {commit}" if commit else "nothing: this is a quick look",
        finished=len(finished),
        cells=len(cells),
        hours=sum(outcome.seconds for outcome in finished) / 3600,
    )
    tables = [_table(task, [o for o in finished if o.cell.task == task]) for task in REPORT]
    path.write_text("\n\n".join([about, *tables]) + "\n")


def row_of(cell: Cell) -> Row:
    """Return the row that a cell is in."""
    return Row(cell.delay, cell.staleness, cell.mismatch)


def differences(outcomes: Iterable[Outcome]) -> dict[str, Interval]:
    """Return how far each method of one place ends above the default, on the same seeds, as one family."""
    ends = {outcome.cell.method: outcome.ends for outcome in outcomes}
    if DEFAULT not in ends:
        return {}
    rivals = [method for method in ends if method != DEFAULT]
    found = simultaneous(np.array([ends[method] - ends[DEFAULT] for method in rivals])) if rivals else []
    return dict(zip(rivals, found, strict=True))


def _table(task: str, outcomes: Sequence[Outcome]) -> str:
    """Methods by rows: where the default ends, and how far each other is above it, in points."""
    rows = list(dict.fromkeys(row_of(outcome.cell) for outcome in outcomes))
    methods = list(dict.fromkeys(outcome.cell.method for outcome in outcomes))
    settings = {outcome.cell.method: str(outcome.cell.setting) for outcome in outcomes}
    here = {row: [o for o in outcomes if row_of(o.cell) == row] for row in rows}
    intervals = {row: differences(here[row]) for row in rows}
    lines = [["method", "setting", *map(str, rows)], ["---", "---", *["---:"] * len(rows)]]
    for method in methods:
        entries = [_entry(method, here[row], intervals[row]) for row in rows]
        lines.append([f"**{method}**" if method == DEFAULT else method, settings[method], *entries])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {task}\n\n{table}"


def _entry(method: str, outcomes: Sequence[Outcome], intervals: dict[str, Interval]) -> str:
    if method in intervals:
        each = intervals[method]
        return f"{100 * each.mean:+.1f} [{100 * each.low:+.1f}, {100 * each.high:+.1f}]"
    ends = [outcome.ends for outcome in outcomes if outcome.cell.method == method]
    return f"{100 * ends[0].mean():.1f}" if ends else "-"
