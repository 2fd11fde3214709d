from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.methods import DEFAULT
from bench.staleness_lab.plan import FULL
from bench.staleness_lab.report import write_report

PLAN = replace(FULL, methods=(DEFAULT, "grpo", "gepo"), staleness=(0, 128), random_staleness=(64,))
RATES = PLAN.middle_rates()
MEASURES: dict[str, tuple[float | None, ...]] = {
    name: (0.1, 0.2)
    for name in ("kl", "ess", "variance_own", "variance_gspo", "variance_gepo", "cv2_gspo", "cv2_gepo")
}


def outcome(cell: Cell, end: float) -> Outcome:
    """A run whose seeds climb to ``end``, each a little higher than the one before."""
    scores = tuple(tuple(end * share + 1e-4 * seed for share in (0.5, 1, 1, 1)) for seed in cell.seeds)
    return Outcome(cell, scores, MEASURES, skipped=0.0, seconds=1.0)


def report(out: Path, ends: Mapping[tuple[str, int], float]) -> str:
    cells = [cell for cell in PLAN.table(RATES) if cell.delay == "fixed"]
    outcomes = [
        outcome(cell, ends[cell.method, cell.staleness])
        for cell in cells
        if (cell.method, cell.staleness) in ends
    ]
    write_report(out, PLAN, outcomes, tuned=[])
    return (out / "staleness.md").read_text()


def test_a_report_says_what_was_kept_what_was_lost_and_what_has_not_run(tmp_path: Path) -> None:
    text = report(tmp_path, {(DEFAULT, 0): 0.9, (DEFAULT, 128): 0.8, ("grpo", 0): 0.9, ("grpo", 128): 0.95})
    assert "8 of 30 cells have run; of the 22 that have not, 4 are of a fixed delay" in text
    assert "88.9 ± 0.0 % of its own on-policy score (promised 99%: not kept)" in text
    assert "1 of 2 methods keep this promise" in text
    assert f"Is `{DEFAULT}` never significantly worse than `grpo` on policy (staleness 0)? yes" in text
    assert "letters, 128 versions: -0.1500 ± 0.0000, p = 0.008" in text
    assert "| gepo |" not in text
    assert "by delay model" not in text
    for name in ("scores", "kl", "curves", "variance"):
        assert (tmp_path / f"staleness_{name}.png").stat().st_size > 0


def test_a_whole_table_lacks_nothing(tmp_path: Path) -> None:
    outcomes = [outcome(cell, 0.9) for cell in PLAN.table(RATES)]
    write_report(tmp_path, PLAN, outcomes, tuned=[])
    text = (tmp_path / "staleness.md").read_text()
    assert "have run" not in text
    assert "letters: score at the end, by delay model and largest staleness" in text
