"""The command from tuning to report, small, in its own processes; cut short and gone on with."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import staleness
from bench.staleness_lab.methods import DEFAULT
from bench.staleness_lab.plan import QUICK, TaskPlan

SMALL = replace(
    QUICK,
    methods=(DEFAULT, "grpo", "reinforce"),
    named=(DEFAULT, "grpo"),
    screened=0,
    trials=2,
    design={"codes8": TaskPlan(versions=4, learning_rate=1e-2)},
    report={"maze": TaskPlan(versions=4, learning_rate=1e-3)},
    lengths=("codes8",),
    seeds=(0, 1),
    staleness=(0, 2),
    mismatch_staleness=2,
)


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["staleness", *arguments, "--out", str(tmp_path), "--workers", "1"])
        return staleness.main()

    monkeypatch.setattr(staleness, "QUICK", SMALL)
    assert run("--quick") == 0
    tuning, report = (tmp_path / f"staleness_{name}.jsonl" for name in ("tuning", "report"))
    assert len(tuning.read_text().splitlines()) == 3 * 2 * 2  # methods, settings, staleness
    whole = report.read_text()
    assert len(whole.splitlines()) == 2 * (8 + 2)  # methods; conditions of the maze, ends of codes8
    assert "20 of 20 report cells have run" in (tmp_path / "staleness.md").read_text()

    report.write_text(whole[:-40])
    assert run("--quick") == 0
    again = report.read_text().splitlines()
    assert again[:19] == whole.splitlines()[:19]
    assert len(again) == 21  # the line that was cut off stays, and is passed over
    assert again[20].split('"scores":')[1].split('"seconds"')[0] in whole


def test_a_full_report_is_refused_before_anything_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["staleness", "report", "--out", str(tmp_path)])
    assert staleness.main() == 1
    assert "does not exist; run `python -m bench.staleness tune` first" in capsys.readouterr().err
