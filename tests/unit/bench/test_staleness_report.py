"""The report and what it is written from: cells that survive a cut, settings that must be committed."""

import gzip
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import staleness
from bench.staleness_lab.cells import Cell, Outcome, Setting
from bench.staleness_lab.frozen import RefusedError, freezing_commit, read_settings
from bench.staleness_lab.methods import FORMS
from bench.staleness_lab.plan import FIRST, HUMPS, REPORT, SHIPPED, WAVES, report_cells
from bench.staleness_lab.report import write_report
from bench.staleness_lab.results import Results
from learner.objective.registry import load_objective
from support.objective_batches import batch_of, gradient_of, made_up

CELL = Cell("safes", "plain", Setting(), "", "humps", 400, "none", 1e-2, (0, 1, 2, 3, 4, 5), 60)


def outcome(cell: Cell, *ends: float) -> Outcome:
    return Outcome(cell, tuple((0.0, end, end, end) for end in ends), skipped=0.0, seconds=36.0)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5])
@pytest.mark.parametrize(
    ("name", "options"), [(SHIPPED, {}), ("undivided, weighs completions", {"divides_by_deviation": False})]
)
def test_the_default_is_the_form_that_the_report_chose(
    name: str, options: dict[str, bool], spread: float
) -> None:
    p, sample = made_up(4, spread=spread)
    shipped, chosen = batch_of(p, sample), batch_of(p, sample)
    loss = load_objective("drift_aware", options)(shipped).loss
    of_form = load_objective(FORMS[name].objective, FORMS[name].options)(chosen).loss
    assert torch.allclose(loss, of_form, rtol=1e-12)
    assert torch.allclose(gradient_of(loss, shipped), gradient_of(of_form, chosen), rtol=1e-12)


def test_every_method_runs_in_every_row_of_every_task_once() -> None:
    settings = read_settings(staleness.FROZEN)
    cells = report_cells(settings)
    assert len({cell.key for cell in cells}) == len(cells)
    rows = {(task, row) for tasks, rows, _ in WAVES for task in tasks for row in rows}
    assert {task for task, _ in rows} == set(REPORT)
    assert len(cells) == len(rows) * len(settings)
    assert set(FIRST) <= set(settings)
    assert {cell.method for cell in cells[: len(FIRST)]} == set(FIRST)


def test_a_line_that_was_cut_off_is_run_again_and_the_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines.gz"
    results, other = Results(path), replace(CELL, method="grpo")
    results.add(outcome(CELL, 0.5, 0.6))
    whole = path.read_bytes()
    results.add(outcome(other, 0.1, 0.2))
    for cut in (path.read_bytes()[:-3], whole + b"\x1f\x8b", whole + b"nothing of ours"):
        path.write_bytes(cut)
        again = Results(path)
        assert CELL in again
        assert other not in again
        again.add(outcome(other, 0.1, 0.2))
        assert [each.ends.tolist() for each in Results(path).of([CELL, other])] == [
            pytest.approx([0.5, 0.6]),
            pytest.approx([0.1, 0.2]),
        ]
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == 2


def test_settings_must_be_committed_as_they_are(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)
        return done.stdout.decode().strip()

    path = tmp_path / "frozen.json"
    with pytest.raises(RefusedError) as missing:
        read_settings(path)
    assert str(path) in str(missing.value)
    path.write_text('{"grpo": {"changes": {"clip_low": 0.4}}, "plain": {}}')
    assert read_settings(path) == {"grpo": Setting(1.0, {"clip_low": 0.4}), "plain": Setting()}
    git("init", "-q")
    with pytest.raises(RefusedError):
        freezing_commit(path)
    git("add", path.name)
    git("commit", "-qm", "frozen")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "other").write_text("")
    git("add", "other")
    git("commit", "-qm", "other")
    assert freezing_commit(path) == commit
    path.write_text("{}")
    with pytest.raises(RefusedError):
        freezing_commit(path)


def test_the_report_says_who_is_ahead_of_the_default_and_what_has_not_run(tmp_path: Path) -> None:
    cells = [replace(CELL, method=method) for method in (SHIPPED, "plain", "grpo", "dg")]
    results = Results(tmp_path / "lines.gz")
    for cell, end in zip(cells, (0.6, 0.5, 0.8), strict=False):
        results.add(outcome(cell, *[end] * 6))
    write_report(tmp_path / "report.md", cells, results, commit="abc")
    text = (tmp_path / "report.md").read_text()
    assert "(abc)" in text
    assert "3 of 4 cells" in " ".join(text.split())
    assert f"| **{SHIPPED}** | 1 | 0 | 0 | +10.0 | +10.0 [+10.0, +10.0] | +10.0 [+10.0, +10.0] |" in text
    assert "| grpo | defaults | +20.0 [+20.0, +20.0] |" in text
    assert f"| **{SHIPPED}** | defaults | 60.0 |" in text
    lost = "1 | 30.0 | -30.0 [-30.0, -30.0]"
    assert f"| plain | defaults | {lost} | safes, {HUMPS}; grpo | 0% | 0 | 0 | 1 |" in text
    assert "| dg " not in text
