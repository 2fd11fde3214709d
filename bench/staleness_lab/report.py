"""The report: how it was done, what decided, and every cell beside the default, as Markdown."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.shared.markdown import table
from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.methods import FORMS
from bench.staleness_lab.plan import CANDIDATE, REPORT, SHIPPED, Row, TaskPlan
from bench.staleness_lab.results import Results
from bench.staleness_lab.statistics import CONFIDENCE, Interval, collapsed_share, simultaneous

_ABOUT: Final = """\
# The staleness laboratory

A policy of version v is trained on completions that the policy of version v - lag wrote. Prompts,
randomness, lags and faults are a matter of the seed alone, so methods are compared seed by seed. All have
the same Adam, the same bound on the gradient norm, and no KL penalty. A run ends at the mean of its last
three of 25 evaluations on held-out prompts, and has collapsed if that is below 80 % of its best.

**Frozen before.** Tasks, rows, seeds, settings, methods and the rule that chooses the default were
committed ({commit}) before any report task had run off policy; the rule is at the top of `plan.py` there.
{finished} of {cells} cells have run: {hours:.1f} processor hours. The rest are shown as -. Raw lines:
`staleness_report.jsonl.gz`; `python -m bench.staleness report` goes on where they end.

**Tasks.** *safes*: 64 tokens, three of which must be right, a table of logits, {safes} seeds. *prices*:
one token, a reward with a cliff, a perceptron, {prices} seeds. *lander*: up to 20 moves, graded reward, a
perceptron, {lander} seeds. *sorting*: a two-layer language model that writes a word's letters in order,
{sorting} seeds; its intervals are wide. All are tiny beside a real model.

**Rows.** *lag L*: every group is L versions old. *half fresh, half L*: every other group. *flipped*: 15 %
of the rewards are 1 - reward. *samplers*: every other group is drawn at a temperature of 0.7, the rest at
1.3. *quantised*: fresh groups, drawn with weights of 4 bits.

**Settings.** Menu methods, M2PO and VCPO have the best of nine settings each on six older tasks (history:
`bench.staleness tune` of 0.3); "defaults" where those, the published ones, were not behind. DRPO was
written from its description, at DPPO's published limit, and has not been tuned; neither have the forms of
the default. GAC (arXiv:2603.01501) is not here: we could not read its thresholds.

Numbers are points of score. A difference is to `{shipped}`, which the menu has as `drift_aware`, on the
same seeds; the intervals of one column hold together with a confidence of {confidence:.0%} (largest |t|
under random signs of the seeds).
"""


def write_report(path: Path, cells: Sequence[Cell], results: Results, *, commit: str) -> None:
    """Write what the finished cells show."""
    finished = results.of(cells)
    path.write_text(report_text(_ABOUT, REPORT, cells, finished, _decision(finished), commit=commit))


def report_text(
    about: str,
    plans: Mapping[str, TaskPlan],
    cells: Sequence[Cell],
    finished: Sequence[Outcome],
    decision: str,
    *,
    commit: str,
) -> str:
    """Return a report: how it was done, what decided, and every finished cell.

    Args:
        about: with places for what is known only now; see the arguments below.
        plans: of the tasks, which have a table each.
    """
    seconds = sum(outcome.seconds for outcome in finished)
    begun = about.format(
        commit=commit or "not at all: this is a quick look",
        finished=len(finished),
        cells=len(cells),
        minutes=seconds / 60,
        hours=seconds / 3600,
        shipped=SHIPPED,
        confidence=CONFIDENCE,
        **{task: len(plan.seeds) for task, plan in plans.items()},
    )
    tables = [_method_table(task, [o for o in finished if o.cell.task == task]) for task in plans]
    return "\n\n".join([begun, decision, _summary_table(finished), *tables]) + "\n"


def places(outcomes: Iterable[Outcome]) -> dict[tuple[str, Row], dict[str, Outcome]]:
    """Return the outcome of each method, by task and row."""
    found: dict[tuple[str, Row], dict[str, Outcome]] = {}
    for outcome in outcomes:
        cell = outcome.cell
        row = Row(cell.delay, cell.staleness, cell.mismatch)
        found.setdefault((cell.task, row), {})[cell.method] = outcome
    return found


def differences(here: Mapping[str, Outcome], *, to: str) -> dict[str, Interval]:
    """Return how far each other method of one place ends above ``to``, on the same seeds, as one family."""
    others = [method for method in here if method != to] if to in here else []
    if not others:
        return {}
    found = simultaneous(np.array([here[method].ends - here[to].ends for method in others]))
    return dict(zip(others, found, strict=True))


def _decision(outcomes: Sequence[Outcome]) -> str:
    """Forms of the default beside the candidate that the rule names, in every place."""
    by_place = places(outcomes)
    forms = [form for form in FORMS if form != CANDIDATE]
    intervals = {
        place: differences({m: o for m, o in here.items() if m in FORMS}, to=CANDIDATE)
        for place, here in by_place.items()
    }
    found = {form: [each[form] for each in intervals.values() if form in each] for form in forms}
    lines = [[_bold(form), *standing(found[form])] for form in forms if found[form]]
    head = [f"beside `{CANDIDATE}`", "better", "tied", "worse", "mean", "least", "most"]
    return f"## What decided\n\n{table(head, lines)}"


def standing(intervals: Collection[Interval]) -> list[str]:
    """Return in how many places a method is better, tied and worse; its mean, least and most difference."""
    words = [interval.verdict for interval in intervals]
    ordered = sorted(intervals, key=lambda interval: interval.mean)
    return [
        *(str(words.count(word)) for word in ("better", "tied", "worse")),
        f"{100 * np.mean([interval.mean for interval in ordered]):+.1f}",
        interval_text(ordered[0]),
        interval_text(ordered[-1]),
    ]


def _summary_table(outcomes: Sequence[Outcome]) -> str:
    """Each method beside the default, and how far it ends below the best of each place."""
    by_place = places(outcomes)
    beside = {place: differences(here, to=SHIPPED) for place, here in by_place.items()}
    best = {place: max(here, key=lambda method: here[method].ends.mean()) for place, here in by_place.items()}
    below = {place: differences(here, to=best[place]) for place, here in by_place.items()}
    lines = []
    for method in dict.fromkeys(outcome.cell.method for outcome in outcomes):
        here = {place: each[method] for place, each in by_place.items() if method in each}
        lost = {place: each[method] for place, each in below.items() if method in each}
        mean = -100 * sum(each.mean for each in lost.values()) / len(here)
        words = [beside[place][method].verdict for place in here if method in beside[place]]
        counts = [str(words.count(word)) if words else "-" for word in ("better", "tied", "worse")]
        entries = [_bold(method), str(next(iter(here.values())).cell.setting), str(len(here)), f"{mean:.1f}"]
        if lost:
            where = min(lost, key=lambda place: lost[place].mean)
            entries += [interval_text(lost[where]), f"{where[0]}, {where[1]}; {best[where]}"]
        else:
            entries += ["-", "-"]
        collapsed = np.mean([collapsed_share(outcome) for outcome in here.values()])
        lines.append((-len(here), mean, [*entries, f"{collapsed:.0%}", *counts]))
    head = [
        *("method", "setting", "cells", "mean lost", "most lost", "where; to which", "collapsed"),
        *("better than default", "tied", "worse"),
    ]
    about = (
        "Lost: points below the best of the place, with the interval of the largest; only methods with as "
        "many cells may be compared. Better, tied, worse: places in which the interval of the difference to "
        "the default says so."
    )
    return f"## All places\n\n{about}\n\n{table(head, [line for _, _, line in sorted(lines)])}"


def _method_table(task: str, outcomes: Sequence[Outcome]) -> str:
    """Methods by rows: where the default ends, and how far each other is above it."""
    by_place = places(outcomes)
    settings = {outcome.cell.method: str(outcome.cell.setting) for outcome in outcomes}
    intervals = {place: differences(here, to=SHIPPED) for place, here in by_place.items()}
    lines = []
    for method in sorted(settings, key=lambda each: each != SHIPPED):
        entries = []
        for place, here in by_place.items():
            if method in intervals[place]:
                entries.append(interval_text(intervals[place][method]))
            else:
                entries.append(f"{100 * here[method].ends.mean():.1f}" if method in here else "-")
        lines.append([_bold(method), settings[method], *entries])
    return f"## {task}\n\n{table(['method', 'setting', *(str(row) for _, row in by_place)], lines)}"


def _bold(method: str) -> str:
    return f"**{method}**" if method == SHIPPED else method


def interval_text(each: Interval) -> str:
    return f"{100 * each.mean:+.1f} [{100 * each.low:+.1f}, {100 * each.high:+.1f}]"
