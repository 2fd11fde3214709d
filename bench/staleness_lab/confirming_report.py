"""The confirming report as Markdown: what the rule makes of it, then every cell."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.shared.markdown import table
from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.confirming import TASKS, Standing, chosen, standings
from bench.staleness_lab.report import interval_text, report_text, standing
from bench.staleness_lab.results import Results

_ABOUT: Final = """\
# The staleness laboratory: plainer forms of the default

The first report, [staleness.md](staleness.md), was seen before this one was planned, and suggested two
plainer forms: no weight (`weighs nothing`), and an advantage that is not divided by the deviation of a
group's rewards (`undivided`). Here both are asked on tasks that neither was seen on. How a cell is run,
what its rows are and what the numbers mean stands there.

**Frozen before.** Tasks, rows, seeds, settings and the rule were committed ({commit}) before any of
these tasks had run off policy; the rule is at the top of `confirming.py` there. {finished} of {cells}
cells have run: {minutes:.0f} processor minutes. The rest are shown as -. Raw lines:
`staleness_confirm.jsonl.gz`; `python -m bench.staleness confirm` goes on where they end.

**Tasks.** *colours*: colour 16 regions of a map so that neighbours differ, a table of logits, reward by
the number of clashes in nine levels, {colours} seeds. *intervals*: two tokens, the lower end of an
interval and its width, paid for being narrow if it holds a quantity, a perceptron, {intervals} seeds.
*unpacking*: a two-layer language model that writes out a word packed by counting, 3 to 7 tokens,
{unpacking} seeds. All are tiny beside a real model.

Differences are to `{shipped}`, the default when this was planned, in points of score, on the same seeds.
The intervals of one place hold together with a confidence of {confidence:.0%}: in *What decided* those
of the three forms, below those of all methods.
"""


def write_confirming_report(path: Path, cells: Sequence[Cell], results: Results, *, commit: str) -> None:
    """Write what the finished cells show."""
    finished = results.of(cells)
    path.write_text(report_text(_ABOUT, TASKS, cells, finished, _decision(finished), commit=commit))


def _decision(outcomes: Sequence[Outcome]) -> str:
    found = standings(outcomes)
    head = ["form", "ahead", "tied", "behind", "mean", "least", "most", "mean, flipped", "the rule says"]
    of_place = [
        [task, str(row), *(interval_text(each.intervals[task, row]) for each in found)]
        for task, row in found[0].intervals
    ]
    return "\n\n".join(
        [
            "## What decided",
            f"By the rule the default is **{chosen(found)}**.",
            table(head, [_line(each) for each in found if each.intervals]),
            table(["task", "row", *(each.form for each in found)], of_place),
        ]
    )


def _line(found: Standing) -> list[str]:
    return [
        found.form,
        *standing(found.intervals.values()),
        f"{100 * found.flipped_mean:+.1f}",
        "; ".join(found.objections) or "may be the default",
    ]
