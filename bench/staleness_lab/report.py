"""The report: how it was done, what the questions' answers are, and the tables, as Markdown."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.frozen import Frozen
from bench.staleness_lab.methods import DEFAULT, RECIPES
from bench.staleness_lab.plan import TUNING_STALENESS, Plan
from bench.staleness_lab.plots import draw
from bench.staleness_lab.results import Results
from bench.staleness_lab.statistics import (
    COLLAPSED_BELOW,
    CONFIDENCE,
    LEARNED,
    Condition,
    Estimate,
    Table,
    collapsed_share,
    mean_measure,
    versions_to_learn,
)
from bench.staleness_lab.trials import Setting
from bench.staleness_lab.tuning import LEAST_MARGIN, Tuned, by_score, tuned
from bench.staleness_lab.verdicts import FAR_VERSIONS, Place, Verdict, described, verdicts

_ABOUT: Final = """\
A policy of version v is trained on completions that the policy of version v - lag wrote. Prompts, the
randomness of sampling, lags and injected faults are a matter of the seed alone, so methods are compared
seed by seed. All have the same Adam, the same bound on the gradient norm, and no KL penalty.

**Design tasks** ({design}) are open to anything. Each of {methods} methods was tuned there with {trials}
settings of its own numbers and of the learning rate, the published setting among them, at staleness
{tuning_staleness} on {tuning_seeds} seeds. Of the settings within {margin} of the best, or within the
standard error of the difference, the one nearest to the published was frozen.

**Report tasks** ({report}) are of other kinds, and no method was tuned on them. {named} named methods and
the {screened} best others on the design tasks ran there once on each of {seeds} seeds, with the settings
of `staleness_frozen.json` (digest {digest}), {committed}. {again}

- *letters* write a word of 3 to 6 letters backwards, one-layer decoder; *digits* name an 8x8 image;
  *codes8*, *codes64*, *codes512* set four decisive places among as many tokens, sparse reward; *reuse*
  the same with 16 tokens and four optimizer steps a version, so that clips to the proximal policy act.
- *routes* orders ten cities, graded reward; *maze* walks up to 20 moves, reward at the goal only;
  *knapsack* takes or leaves 24 items, graded reward, none for a sack that bursts; *palindromes* is a
  two-layer language model on reasoning-gym's palindrome_generation, whose words grow from 4 to 6 letters
  during the run; it is scored on words of 6.

A run *ends* at the mean of its last three of 25 evaluations and has *collapsed* if that is below
{collapsed:.0%} of its best. Its *speed* is the version at which its mean score has gone {learned:.0%} of
the way to the best on-policy end of the task. After ± stand standard errors; intervals of differences
hold together with a confidence of {confidence:.0%} for all comparisons of an answer (the largest |t|
under random signs of the seeds). The staleness of a fixed delay is every group's lag, of the others the
largest: uniform, or the log-normal and the Weibull of refresh times between 60 s and 1920 s, where 1920 s
stands for that staleness. *bf16* rounds the recorded logprobs, *quantised* samples with weights of 4
bits, *outliers* moves one token in 1000 by 3 to 10 nats.

{hours}
"""


def write_report(
    out: Path,
    plan: Plan,
    frozen: Frozen,
    *,
    is_committed: bool,
    tuning: Results,
    results: Results,
    workers: int,
) -> None:
    """Write ``staleness.md`` and the pictures it shows to ``out``; with whatever is finished."""
    cells = plan.report_cells(frozen.settings)
    finished = results.of(cells)
    table, found = Table.of(finished), tuned(plan, tuning)
    hours = tuning.hours(plan.tuning_cells()), results.hours(cells)
    about = _ABOUT.format(
        design=", ".join(plan.design),
        methods=len(plan.methods),
        trials=plan.trials,
        tuning_staleness=" and ".join(map(str, TUNING_STALENESS)),
        tuning_seeds=len(plan.tuning_seeds),
        margin=LEAST_MARGIN,
        report=", ".join(plan.report),
        named=len(plan.named),
        screened=len(frozen.settings) - len(plan.named),
        seeds=len(plan.seeds),
        digest=frozen.digest[:12],
        committed="committed before" if is_committed else "**not committed: a look, not a result**",
        again=run_before(results.all(), cells),
        collapsed=COLLAPSED_BELOW,
        learned=LEARNED,
        confidence=CONFIDENCE,
        hours=(
            f"{len(finished)} of {len(cells)} report cells have run. Tuning takes {hours[0]:.2f} processor "
            f"hours, the report {hours[1]:.2f}: {sum(hours) / workers:.1f} hours with {workers} processes, "
            "of which what has not run is counted like the finished cells of its kind."
        ),
    )
    sections = [f"# The staleness laboratory\n\n{about}", _answers(verdicts(table, plan))]
    pictures = draw(out, plan, table, list(frozen.settings)) if finished else []
    sections.append("## Pictures\n\n" + "\n\n".join(f"![{title}]({name})" for name, title in pictures))
    sections.append(_losses(table, plan))
    sections += [_scores(table, plan, task) for task in plan.report]
    sections += [_stability(table, plan, task) for task in plan.report]
    sections += [_lengths(table, plan), _design(plan, tuning, found, frozen.settings)]
    (out / "staleness.md").write_text("\n\n".join(section.strip() for section in sections) + "\n")


def run_before(outcomes: Sequence[Outcome], cells: Sequence[Cell]) -> str:
    """Say which methods ran on which report tasks with other numbers than those of ``cells``."""
    frozen = {(cell.method, cell.recipe, cell.setting.rate) for cell in cells}
    other: dict[str, set[str]] = {}
    for cell in (o.cell for o in outcomes if o.cell.purpose == "report"):
        if (cell.method, cell.recipe, cell.setting.rate) not in frozen:
            other.setdefault(cell.method, set()).add(cell.task)
    if not other:
        return "No method has run there with other numbers."
    ran = "; ".join(f"{method} on {', '.join(sorted(tasks))}" for method, tasks in sorted(other.items()))
    return f"**With other numbers, frozen earlier, ran there before: {ran}.**"


def _answers(found: Sequence[Verdict]) -> str:
    words = {True: "yes", False: "**no**", None: "not measured"}
    lines = ["## Answers", ""]
    for verdict in found:
        lines.append(f"- {verdict.question} {words[verdict.holds]}")
        lines += [f"  - {detail}" for detail in verdict.details]
    return "\n".join(lines)


def _scores(table: Table, plan: Plan, task: str) -> str:
    """Methods by where they end on average over all conditions, the best first."""
    conditions = plan.conditions()
    rows = [
        [_name(method), *(_each(table.get(task, method, c), _end) for c in conditions)]
        for method in _ranked(table, task, conditions)
    ]
    head = ["method", *map(_condition, conditions)]
    return f"## {task}: score at the end (%)\n\n{_markdown(head, rows)}"


def _losses(table: Table, plan: Plan) -> str:
    """How far each method ends below the best of a cell, the smallest mean first."""
    losses: dict[str, dict[Place, float]] = {}
    for place in ((task, c) for task in plan.report for c in plan.conditions() if c[1] >= FAR_VERSIONS):
        ends = {method: float(outcome.ends.mean()) for method, outcome in table.methods(*place).items()}
        for method, end in ends.items():
            losses.setdefault(method, {})[place] = 100 * (max(ends.values()) - end)
    rows = []
    for method, here in sorted(losses.items(), key=lambda item: float(np.mean(list(item[1].values())))):
        by_task = [[loss for (each, _), loss in here.items() if each == task] for task in plan.report]
        means = [f"{np.mean(some):.1f}" if some else "-" for some in ([*here.values()], *by_task)]
        worst = max(here, key=here.__getitem__)
        rows.append([_name(method), *means, f"{here[worst]:.1f}", described(worst)])
    head = ["method", "mean", *plan.report, "largest", "where"]
    title = f"## Points lost to the best method of each cell, at {FAR_VERSIONS} versions and more"
    return f"{title}\n\n{_markdown(head, rows)}"


def _stability(table: Table, plan: Plan, task: str) -> str:
    conditions = plan.conditions()
    fresh = table.methods(task, ("fixed", 0, "none"))
    goal = max((float(outcome.ends.mean()) for outcome in fresh.values()), default=float("nan"))
    ages = plan.staleness
    head = ["method", "collapsed", *(f"{name} at {s}" for name in ("speed", "KL", "ESS") for s in ages)]
    rows = []
    for method in _ranked(table, task, conditions):
        all_cells = [table.get(task, method, c) for c in conditions]
        collapsed = np.mean([collapsed_share(cell) for cell in all_cells if cell is not None])
        cells = [table.fixed(task, method, s) for s in ages]
        speeds = [_each(cell, lambda o: _versions(versions_to_learn(o, goal=goal))) for cell in cells]
        measures = [
            _each(cell, lambda o, name=name: _measure(o, name))  # type: ignore[misc]
            for name in ("kl", "ess")
            for cell in cells
        ]
        rows.append([_name(method), f"{collapsed:.0%}", *speeds, *measures])
    about = (
        "Collapsed: share of the runs of all conditions. KL: exact, behaviour against learner, nats a token, "
        "mean of the run. ESS: of the method's own weights over the batch."
    )
    return f"## {task}: collapse, speed, divergence\n\n{about}\n\n{_markdown(head, rows)}"


def _lengths(table: Table, plan: Plan) -> str:
    ends = (plan.staleness[0], plan.staleness[-1])
    head = ["method", *(f"{task} at {s}" for task in plan.lengths for s in ends)]
    conditions: list[Condition] = [("fixed", s, "none") for s in ends]
    methods = _ranked(table, plan.lengths[-1], conditions)
    rows = [
        [_name(m), *(_each(table.fixed(task, m, s), _end) for task in plan.lengths for s in ends)]
        for m in methods
    ]
    return f"## By completion length (design tasks): score at the end (%)\n\n{_markdown(head, rows)}"


def _design(plan: Plan, tuning: Results, found: Mapping[str, Tuned], settings: Mapping[str, Setting]) -> str:
    columns = [(task, s) for task in plan.design for s in TUNING_STALENESS]
    rows = []
    for method in by_score(found):
        setting = found[method].setting
        cells = next(cells for each, cells in plan.tuning(method) if each == setting)
        ends = {(o.cell.task, o.cell.staleness): f"{100 * o.ends.mean():.1f}" for o in tuning.of(cells)}
        scores = [f"{100 * found[method].score:.1f}", f"{100 * found[method].published:.1f}"]
        here = "yes" if method in settings else ""
        rows.append([_name(method), here, str(setting), *scores, *(ends[column] for column in columns)])
    head = ["method", "in the report", "frozen setting", "mean", "published setting"]
    recipes = "\n".join(
        f"- {_name(m)}: `{RECIPES[m].changed(found[m].setting.changes)}`" for m in by_score(found)
    )
    table = _markdown([*head, *(f"{task} {s}" for task, s in columns)], rows)
    return f"## Design tasks: tuned scores (%)\n\n{table}\n\n## Methods as frozen\n\n{recipes}"


def _ranked(table: Table, task: str, conditions: Sequence[Condition]) -> list[str]:
    """Methods with a cell of the task, the best mean end first."""
    ends: dict[str, list[float]] = {}
    for condition in conditions:
        for method, outcome in table.methods(task, condition).items():
            ends.setdefault(method, []).append(float(outcome.ends.mean()))
    return sorted(ends, key=lambda method: float(np.mean(ends[method])), reverse=True)


def _condition(condition: Condition) -> str:
    delay, staleness, mismatch = condition
    return f"{delay} {staleness}" if mismatch == "none" else f"{mismatch} {staleness}"


def _name(method: str) -> str:
    return f"**{method}**" if method == DEFAULT else method


def _each(cell: Outcome | None, write: Callable[[Outcome], str]) -> str:
    return "-" if cell is None else write(cell)


def _end(cell: Outcome) -> str:
    end = Estimate.of(cell.ends)
    return f"{100 * end.mean:.1f} ± {100 * end.error:.1f}"


def _versions(count: float) -> str:
    return "never" if np.isinf(count) else f"{count:.0f}"


def _measure(cell: Outcome, name: str) -> str:
    """Write three digits; what is below a millionth is rounding, and 0."""
    value = mean_measure(cell, name)
    return "0" if abs(value) < 1e-6 else f"{value:.3g}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
