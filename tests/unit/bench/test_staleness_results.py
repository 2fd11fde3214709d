"""A table that survives being killed."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.results import Results
from bench.staleness_lab.trials import Setting

SETTING = Setting(1 / 3, {"clip_high": 0.28, "dual_clip": float("inf"), "gate": "none"})
CELL = Cell("report", "maze", "gepo", SETTING, "gepo()", "fixed", 8, "bf16", 3e-3, (0, 1), 50)
OUTCOME = Outcome(CELL, ((0.1, 0.2), (0.1, 0.3)), {"kl": (0.5, None)}, 0.0, 1.5)


def test_a_finished_cell_is_found_again_by_the_next_run(tmp_path: Path) -> None:
    Results(tmp_path / "new" / "results.jsonl").add(OUTCOME)
    again = Results(tmp_path / "new" / "results.jsonl")
    assert CELL in again
    assert again.of([CELL]) == again.all() == [OUTCOME]


def test_a_cell_that_differs_in_anything_is_not_finished(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    results.add(OUTCOME)
    for other in (
        replace(CELL, staleness=9),
        replace(CELL, recipe="gepo(clip_low=0.1)"),
        replace(CELL, setting=Setting(1 / 3)),
        replace(CELL, mismatch="none"),
        replace(CELL, seeds=(0, 2)),
        replace(CELL, learning_rate=1e-3),
    ):
        assert other not in results


def test_a_line_cut_off_by_a_kill_costs_only_its_own_cell(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    second, third = (replace(OUTCOME, cell=replace(CELL, staleness=s)) for s in (32, 64))
    Results(path).add(OUTCOME)
    with path.open("a") as file:
        file.write(second.to_line()[:40])
    Results(path).add(third)
    again = Results(path)
    assert CELL in again
    assert third.cell in again
    assert second.cell not in again


def test_a_cell_that_has_not_run_takes_as_long_as_others_of_its_kind(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    for staleness, seconds in ((8, 1800.0), (9, 5400.0)):
        results.add(replace(OUTCOME, cell=replace(CELL, staleness=staleness), seconds=seconds))
    alike, other = replace(CELL, staleness=64), replace(CELL, delay="uniform")
    assert results.hours([CELL]) == pytest.approx(0.5)
    assert results.hours([CELL, alike]) == pytest.approx(0.5 + 1.0)
    assert results.hours([other]) != results.hours([other])  # nan
