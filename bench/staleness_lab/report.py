"""The report: what was done, what the questions' answers are, and the tables, as Markdown."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from bench.staleness_lab.cells import Outcome
from bench.staleness_lab.delays import DELAYS
from bench.staleness_lab.methods import DEFAULT, described
from bench.staleness_lab.plan import TUNING_SEEDS, TUNING_STALENESS, Plan, chosen_rates, last_scores
from bench.staleness_lab.plots import draw
from bench.staleness_lab.statistics import (
    COLLAPSED_BELOW,
    Estimate,
    Table,
    collapsed_share,
    gaps,
    mean_measure,
)
from bench.staleness_lab.verdicts import RETAINED, Verdict, verdicts

_ABOUT: Final = """\
A policy of version v is trained on completions that the policy of version v - lag wrote; a version is
one optimizer step. Prompts, the randomness of sampling, start policies and lags are a matter of the seed
alone, so methods are compared seed by seed. Every method has its published numbers, the same Adam, the
same bound on the gradient norm, no KL penalty, and a learning rate of its own: the one whose runs end best
over staleness {tuning_staleness} on {tuning_seeds} other seeds, of
{rates}.

- **digits**: contextual bandit on scikit-learn's digits, a perceptron from scratch, 16 images x 8 actions
  a version, {digits_versions} versions. Score: accuracy of the most probable digit on 360 held-out images.
- **letters**: write a word of 3 to 6 letters backwards; a one-layer transformer, warm-started until it
  does so 15 % of the time; 4 words x 8 completions a version, reward 1 for the whole word,
  {letters_versions} versions. Score: probability of the right answer on 128 held-out words, which is the
  expected reward.

A run *ends* at the mean of its last three of 25 evaluations; its *best* is the best such mean; it has
*collapsed* if it ends below {collapsed:.0%} of its best. Where one did so on policy, nothing is there to
retain. Errors are standard errors over {seeds} seeds. p-values are exact sign-flip tests, not corrected
for their number. The staleness of a fixed delay is every group's lag, of the other delays the largest:
uniform, or the log-normal and the Weibull of refresh times between 60 s and 1920 s, where 1920 s stands
for that staleness. An outer discount of old groups does nothing at a fixed delay, where all are equally
old: Adam ignores scale.
"""


def write_report(out: Path, plan: Plan, outcomes: Sequence[Outcome], *, tuned: Sequence[Outcome]) -> None:
    """Write ``staleness.md`` and the pictures it shows to ``out``; with whatever is finished."""
    table = Table.of(outcomes)
    about = f"{_about(plan)}\n{_finished(table, plan)}"
    sections = [f"# The staleness laboratory\n\n{about}", _answers(verdicts(table, plan))]
    for task in plan.tasks:
        sections.append(_scores(table, plan, task))
    for task in plan.tasks:
        sections += [_stability(table, plan, task), _weights(table, plan, task)]
        if any(delay != "fixed" for _, _, delay, _ in table.cells):
            sections.append(_delays(table, plan, task))
    sections += [_rates(plan, tuned, outcomes), _recipes(plan)]
    pictures = draw(out, plan, table) if outcomes else []
    sections.insert(2, "## Pictures\n\n" + "\n\n".join(f"![{title}]({name})" for name, title in pictures))
    (out / "staleness.md").write_text("\n\n".join(section.strip() for section in sections) + "\n")


def _about(plan: Plan) -> str:
    rates = "; ".join(
        f"{', '.join(f'{r:g}' for r in each.rates)} ({task})" for task, each in plan.tasks.items()
    )
    versions = {f"{task}_versions": each.versions for task, each in plan.tasks.items()}
    return _ABOUT.format(
        **{"digits_versions": "no", "letters_versions": "no"} | versions,
        rates=rates,
        tuning_staleness=" and ".join(map(str, TUNING_STALENESS)),
        tuning_seeds=len(TUNING_SEEDS),
        collapsed=COLLAPSED_BELOW,
        seeds=len(plan.seeds),
    )


def _finished(table: Table, plan: Plan) -> str:
    """Say what the table still lacks; nothing where it is whole."""
    asked = {(cell.task, cell.method, cell.delay, cell.staleness) for cell in plan.table(plan.middle_rates())}
    missing = asked - table.cells.keys()
    if not missing:
        return ""
    fixed = sum(delay == "fixed" for _, _, delay, _ in missing)
    return (
        f"{len(asked) - len(missing)} of {len(asked)} cells have run; of the {len(missing)} that have not, "
        f"{fixed} are of a fixed delay. What a table lacks is a dash or a missing row.\n"
    )


def _answers(found: Sequence[Verdict]) -> str:
    words = {True: "yes", False: "**no**", None: "not measured"}
    lines = ["## Answers", ""]
    for verdict in found:
        lines.append(f"- {verdict.question} {words[verdict.holds]}")
        lines += [f"  - {detail}" for detail in verdict.details]
    return "\n".join(lines)


def _scores(table: Table, plan: Plan, task: str) -> str:
    """Methods by where they end on average over all staleness, the best first."""
    retained = [s for s in RETAINED if s in plan.staleness]
    head = ["method", *(f"{s}" for s in plan.staleness), *(f"retained at {s}" for s in retained), "collapsed"]
    rows = []
    for method in _by_mean_end(table, plan, task):
        cells = [table.get(task, method, s) for s in plan.staleness]
        row = [_name(method), *(_each(cell, _end) for cell in cells)]
        for staleness in retained:
            share = table.retained(task, method, staleness, of=method)
            row.append("-" if share is None else f"{100 * share.mean:.1f} ± {100 * share.error:.1f} %")
        finished = [collapsed_share(cell) for cell in cells if cell is not None]
        rows.append([*row, f"{np.mean(finished):.0%}" if finished else "-"])
    return f"## {task}: score at the end, by staleness in versions (%)\n\n{_markdown(head, rows)}"


def _stability(table: Table, plan: Plan, task: str) -> str:
    head = ["method", *(f"{s}" for s in plan.staleness)]
    rows = [
        [_name(method), *(_each(table.get(task, method, s), _gap) for s in plan.staleness)]
        for method in _by_mean_end(table, plan, task)
    ]
    return f"## {task}: best minus last (points) / share of collapsed runs\n\n{_markdown(head, rows)}"


def _weights(table: Table, plan: Plan, task: str) -> str:
    ages = [s for s in plan.staleness if s in (0, 32, 128, 256)]
    head = ["method", *(f"{name} at {s}" for name in ("KL", "ESS", "variance") for s in ages)]
    rows = [
        [
            _name(method),
            *(
                _each(table.get(task, method, s), partial(_measure, name=name))
                for name in ("kl", "ess", "variance_own")
                for s in ages
            ),
        ]
        for method in _by_mean_end(table, plan, task)
    ]
    about = (
        "Means over the run: exact KL(behaviour || learner) in nats a token; effective sample size over the "
        "batch, and variance within a group, of the method's own weights (a completion's mean where they are "
        "tokens')."
    )
    return f"## {task}: divergence and weights\n\n{about}\n\n{_markdown(head, rows)}"


def _delays(table: Table, plan: Plan, task: str) -> str:
    columns = [(delay, s) for s in plan.random_staleness for delay in DELAYS]
    head = ["method", *(f"{delay} {s}" for delay, s in columns)]
    rows = [
        [_name(method), *(_each(table.get(task, method, s, delay), _end) for delay, s in columns)]
        for method in _by_mean_end(table, plan, task)
        if any(table.get(task, method, s, delay) for delay, s in columns if delay != "fixed")
    ]
    return f"## {task}: score at the end, by delay model and largest staleness (%)\n\n{_markdown(head, rows)}"


def _rates(plan: Plan, tuned: Sequence[Outcome], outcomes: Sequence[Outcome]) -> str:
    used = {(o.cell.task, o.cell.method): o.cell.learning_rate for o in outcomes}
    ends = {(o.cell.task, o.cell.method, o.cell.learning_rate, o.cell.staleness): o for o in tuned}
    rows = []
    for task, each in plan.tasks.items():
        for method in (method for method in plan.methods if (task, method) in used):
            tried = [
                " / ".join(_each(ends.get((task, method, rate, s)), _end_alone) for s in TUNING_STALENESS)
                for rate in each.rates
            ]
            rows.append([task, _name(method), *tried, f"{used.get((task, method), float('nan')):g}"])
    at_edge = sum(
        used[key] in (plan.tasks[key[0]].rates[0], plan.tasks[key[0]].rates[-1])
        for key in chosen_rates(tuned)
        if key in used
    )
    head = ["task", "method", "lowest rate", "middle", "highest", "used"]
    about = (
        f"Score at the end (%) on the tuning seeds at staleness {' / '.join(map(str, TUNING_STALENESS))}; "
        f"{at_edge} of {len(used)} choices lie at an end of the grid."
    )
    return f"## Learning rates\n\n{about}\n\n{_markdown(head, rows)}"


def _recipes(plan: Plan) -> str:
    lines = [f"- {_name(method)}: `{described(method)}`" for method in plan.methods]
    return "## Methods\n\n" + "\n".join(lines)


def _by_mean_end(table: Table, plan: Plan, task: str) -> list[str]:
    """Methods with a cell of the task, the best first."""
    ends = {}
    for method in plan.methods:
        cells = [table.get(task, method, s) for s in plan.staleness]
        if any(cells):
            ends[method] = np.mean([last_scores(cell.scores).mean() for cell in cells if cell is not None])
    return sorted(ends, key=lambda method: ends[method], reverse=True)


def _name(method: str) -> str:
    return f"**{method}**" if method == DEFAULT else method


def _each(cell: Outcome | None, write: Callable[[Outcome], str]) -> str:
    return "-" if cell is None else write(cell)


def _end(cell: Outcome) -> str:
    end = Estimate.of(last_scores(cell.scores))
    return f"{100 * end.mean:.1f} ± {100 * end.error:.1f}"


def _end_alone(cell: Outcome) -> str:
    return f"{100 * float(last_scores(cell.scores).mean()):.1f}"


def _gap(cell: Outcome) -> str:
    gap = Estimate.of(gaps(cell))
    return f"{100 * gap.mean:.1f} ± {100 * gap.error:.1f} / {collapsed_share(cell):.0%}"


def _measure(cell: Outcome, *, name: str) -> str:
    """Write three digits; what is below a millionth is rounding, and 0."""
    value = mean_measure(cell, name)
    return "0" if abs(value) < 1e-6 else f"{value:.3g}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
