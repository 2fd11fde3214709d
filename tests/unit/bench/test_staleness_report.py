"""The report on made-up outcomes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.frozen import Frozen
from bench.staleness_lab.methods import DEFAULT
from bench.staleness_lab.plan import FULL, Plan
from bench.staleness_lab.report import write_report
from bench.staleness_lab.results import Results
from bench.staleness_lab.statistics import Table
from bench.staleness_lab.trials import Setting
from bench.staleness_lab.verdicts import Verdict, verdicts

METHODS = (DEFAULT, "grpo", "gepo", "tis")
PLAN = replace(FULL, methods=METHODS, named=(DEFAULT, "grpo"), screened=2, trials=1)
SETTINGS = {method: Setting() for method in METHODS}

Ends = Callable[[Cell], float]


def outcome(cell: Cell, end: float) -> Outcome:
    """Return a run whose seeds climb from 0.1 to ``end``, some a little higher than the others."""
    scores = tuple((0.1, end / 2, *[end + 0.001 * (seed % 3)] * 3) for seed in cell.seeds)
    measures: dict[str, tuple[float | None, ...]] = {"kl": (0.1, 0.2), "lag": (1.0, 2.0), "ess": (1.0, None)}
    return Outcome(cell, scores, measures, skipped=0.0, seconds=36.0)


def answers(end: Ends) -> list[Verdict]:
    """Return the verdicts on a whole table."""
    return verdicts(Table.of(outcome(cell, end(cell)) for cell in PLAN.report_cells(SETTINGS)), PLAN)


def of_method(**ends: float) -> Ends:
    """Return ends that depend on the method alone."""
    return lambda cell: ends.get(cell.method, 0.6)


def test_a_default_that_nothing_exceeds_is_tied_or_better_everywhere() -> None:
    stale, mismatched, fresh, lengths, separates, on_policy = answers(of_method(tis=0.5))
    assert [stale.holds, mismatched.holds, fresh.holds, lengths.holds, on_policy.holds] == [True] * 5
    assert separates.holds is False  # three of four methods reach 95 % of the best
    assert "72 comparisons" in stale.details[0]  # three rivals, four tasks, six conditions
    assert "maze, weibull 256: better than 1, tied with 2, worse than 0" in "\n".join(stale.details)


def test_one_significantly_better_rival_in_one_cell_is_a_no() -> None:
    def end(cell: Cell) -> float:
        is_there = (cell.method, cell.task, cell.delay) == ("tis", "maze", "weibull")
        return 0.7 if is_there else 0.6

    stale, mismatched, *_ = answers(end)
    assert stale.holds is False
    assert "against the best, `tis`: -10.0" in "\n".join(stale.details)
    assert mismatched.holds is True


def test_being_worse_than_grpo_on_policy_is_a_no() -> None:
    _, _, fresh, *_ = answers(lambda cell: 0.7 if cell.method == "grpo" and cell.staleness == 0 else 0.6)
    assert fresh.holds is False


def test_a_default_that_loses_its_score_at_one_length_keeps_no_promise() -> None:
    def end(cell: Cell) -> float:
        is_lost = cell.method == DEFAULT and cell.task == "codes512" and cell.staleness == 256
        return 0.5 if is_lost else 0.6

    lengths = answers(end)[3]
    assert lengths.holds is False
    assert "codes512: 83.4 ± 0.0 %, `grpo` 100.0 ± 0.0 %" in "\n".join(lengths.details)


def test_methods_that_stall_on_policy_and_those_at_the_ceiling_are_named() -> None:
    on_policy = answers(of_method(grpo=0.12, gepo=0.99))[5]
    assert on_policy.holds is False
    assert "maze: grpo gain less than 5 points" in on_policy.details
    assert "maze: gepo are at the ceiling (98% or more)" in on_policy.details


def test_nothing_measured_is_nothing_said() -> None:
    assert all(verdict.holds is None for verdict in verdicts(Table.of([]), PLAN))


@pytest.fixture
def tuning(tmp_path: Path) -> Results:
    """A finished tuning."""
    results = Results(tmp_path / "tuning.jsonl")
    for cell in PLAN.tuning_cells():
        results.add(outcome(cell, 0.5))
    return results


def report(out: Path, tuning: Results, cells: list[Cell], end: Ends, *, plan: Plan = PLAN) -> str:
    results = Results(out / "report.jsonl")
    for cell in cells:
        results.add(outcome(cell, end(cell)))
    frozen = Frozen.of(plan, tuning)
    write_report(out, plan, frozen, is_committed=True, tuning=tuning, results=results, workers=2)
    return (out / "staleness.md").read_text()


def test_a_whole_report_has_every_table_picture_and_loss_and_its_own_time(
    tmp_path: Path, tuning: Results
) -> None:
    def end(cell: Cell) -> float:
        is_there = (cell.method, cell.task, cell.staleness) == ("tis", "maze", 128)
        return 0.5 if is_there else 0.6

    cells = PLAN.report_cells(SETTINGS)
    text = report(tmp_path, tuning, cells, end)
    hours = len(cells) / 100
    assert f"{len(cells)} of {len(cells)} report cells have run" in text
    assert f"the report {hours:.2f}: {(hours + len(PLAN.tuning_cells()) / 100) / 2:.1f} hours" in text
    assert "committed before. No method has run there with other numbers." in text
    for title in (
        "Points lost to the best method of each cell, at 32 versions",
        "palindromes: score at the end",
        "maze: collapse, speed",
        "By completion length",
        "Design tasks",
    ):
        assert f"## {title}" in text
    assert "weibull 256 | bf16 32 | quantised 32 | outliers 32 |" in text
    for name in ("scores", "kl", "curves", "lengths"):
        assert (tmp_path / f"staleness_{name}.png").stat().st_size > 0
    # A method loses what the best of each cell is ahead.
    assert f"| tis | {10 / 36:.1f} | 0.0 | {10 / 9:.1f} | 0.0 | 0.0 | 10.0 | maze, fixed 128 |" in text
    assert "| grpo | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | routes, fixed 32 |" in text


def test_a_report_says_what_has_not_run_and_what_ran_with_other_settings(
    tmp_path: Path, tuning: Results
) -> None:
    plan = replace(PLAN, report={"routes": PLAN.report["routes"]}, lengths=("codes8",))  # pictures take long
    others = plan.report_cells({"tis": Setting(3.0)})
    text = report(tmp_path, tuning, [*plan.report_cells(SETTINGS)[:8], others[0]], of_method(), plan=plan)
    assert f"8 of {len(plan.report_cells(SETTINGS))} report cells have run" in text
    assert "**With other numbers, frozen earlier, ran there before: tis on routes.**" in text
