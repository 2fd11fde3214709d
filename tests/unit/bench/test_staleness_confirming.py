"""The rule that chooses among plainer forms of the default, and which cells it looks at."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench import staleness
from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.confirming import PLAINER, TASKS, TODAY, chosen, confirming_cells, standings
from bench.staleness_lab.confirming_report import write_confirming_report
from bench.staleness_lab.frozen import read_settings
from bench.staleness_lab.plan import report_cells
from bench.staleness_lab.results import Results

CELLS = confirming_cells(read_settings(staleness.CONFIRM_FROZEN))
PLACES = list(dict.fromkeys((cell.task, cell.delay, cell.staleness, cell.mismatch) for cell in CELLS))
FLIPPED = [each for each in PLACES if each[3] == "flipped"]


def place(cell: Cell) -> tuple[str, str, int, str]:
    return cell.task, cell.delay, cell.staleness, cell.mismatch


def outcomes(ahead: dict[tuple[str, str, int, str], float], form: str = PLAINER[0]) -> list[Outcome]:
    """Every deciding cell, level but ``form``, which is ahead by so many points in those places."""
    found = []
    for cell in CELLS:
        if cell.method in (TODAY, *PLAINER):
            end = 0.5 + (ahead.get(place(cell), 0.0) / 100 if cell.method == form else 0.0)
            found.append(Outcome(cell, tuple((0.0, end, end, end) for _ in cell.seeds), 0.0, 1.0))
    return found


def test_those_that_decide_run_first_and_every_cell_once() -> None:
    assert len({cell.key for cell in CELLS}) == len(CELLS)
    assert {cell.task for cell in CELLS} == set(TASKS)
    deciding = [cell for cell in CELLS if cell.method in (TODAY, *PLAINER)]
    assert CELLS[: len(deciding)] == deciding
    assert len(deciding) == len(PLACES) * 4
    assert not {cell.seeds[0] for cell in CELLS} & {1000, 1001}


def test_no_cell_of_the_first_report_is_another_than_when_it_ran() -> None:
    cells = report_cells(read_settings(staleness.FROZEN))
    assert len(Results(staleness.RECORD / "staleness_report.jsonl.gz").of(cells)) == 742


def test_the_plainest_of_level_forms_is_chosen() -> None:
    assert chosen(standings(outcomes({}))) == PLAINER[0]
    assert chosen(standings([])) == TODAY


@pytest.mark.parametrize(
    "ahead",
    [
        pytest.param({PLACES[0]: -1.0}, id="behind in more places than ahead"),
        pytest.param({PLACES[0]: -2.5, PLACES[4]: 1.0, PLACES[5]: 1.0}, id="too far behind in one"),
        pytest.param({FLIPPED[0]: -0.5, PLACES[4]: 1.0, PLACES[5]: 1.0}, id="behind with flipped rewards"),
    ],
)
def test_a_form_that_loses_where_it_may_not_is_passed_over(
    ahead: dict[tuple[str, str, int, str], float],
) -> None:
    assert not set(ahead) - set(PLACES)
    first, *others = standings(outcomes(ahead))
    assert len(first.objections) == 1
    assert chosen([first, *others]) == PLAINER[1]


def test_a_mean_behind_with_flipped_rewards_counts_where_no_interval_says_so() -> None:
    found = outcomes({})
    for index, outcome in enumerate(found):
        if outcome.cell.method == PLAINER[0] and outcome.cell.mismatch == "flipped":
            wide = [0.5 + (0.2 if seed % 2 else -0.25) for seed in range(len(outcome.cell.seeds))]
            found[index] = replace(outcome, scores=tuple((0.0, end, end, end) for end in wide))
    first = standings(found)[0]
    assert first.count("worse") == 0
    assert len(first.objections) == 1


def test_a_place_counts_where_all_four_have_run(tmp_path: Path) -> None:
    results = Results(tmp_path / "lines.gz")
    for outcome in outcomes({PLACES[0]: 3.0})[:6]:
        results.add(outcome)
    assert [len(each.intervals) for each in standings(results.of(CELLS))] == [1, 1, 1]
    write_confirming_report(tmp_path / "report.md", CELLS, results, commit="abc")
    text = (tmp_path / "report.md").read_text()
    assert "(abc)" in text
    assert f"By the rule the default is **{PLAINER[0]}**." in text
    assert f"| {PLAINER[0]} | 1 | 0 | 0 | +3.0 | +3.0 [+3.0, +3.0] | +3.0 [+3.0, +3.0] | +0.0 |" in text
