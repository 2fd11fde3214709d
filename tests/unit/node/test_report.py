"""``heterorl-node report``: one file that says what a run was, with nothing that runs or loads."""

import json
import math
import re
import sqlite3
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from node.commands.cli import main
from node.coordinator.ledger.fact_rows import row_of
from node.coordinator.ledger.ledger_file import FILE_NAME, Ledger
from node.coordinator.work.tallies import Tally
from node.exit_code import ExitCode
from node.process.last_start import note_settings
from node.run import Role
from node.svg_chart import MOST_POINTS, Series, chart, running_mean
from node.verdict import Verdict


def step(version: int, **changes: Any) -> dict[str, Any]:
    group = {"group_id": f"{version}.1", "sampler_id": "sampler-a", "staleness_versions": 2}
    return {
        "version": version,
        "at_s": 1e9 + version,
        "tokens": 100,
        "groups": [group],
        "reward_mean": version / 10,
        "kl_nats": 0.01,
        "ess_ratio": math.nan,
        "staleness_mean_versions": 2.0,
        "staleness_max_versions": 2,
        "learning_rate": 1e-6,
        "step_s": 0.5,
        "groups_wait_s": 0.25,
        "grader_metrics": {"format<b>": 0.5},
        **changes,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the state directory of a run of four steps and a rollback, with one evaluation."""
    learner, coordinator = tmp_path / Role.LEARNER, tmp_path / Role.COORDINATOR
    learner.mkdir()
    coordinator.mkdir()
    rollback = {
        "version": 4,
        "at_s": 1e9 + 4,
        "restored_version": 2,
        "groups": [],
        "tokens": 0,
        "step_s": 0.1,
    }
    lines = [step(1), step(2), step(3, changed_settings={"learning_rate": ["1e-06", "5e-07"]})]
    lines += [rollback, step(5)]
    (learner / "steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"half')
    settings = {"objective": "grpo", "learning_rate": 5e-7, "wandb_api_key": "hidden"}
    note_settings(learner, role=Role.LEARNER, settings=settings)
    Ledger.open(coordinator / FILE_NAME, run_id="run-1").close()
    with sqlite3.connect(coordinator / FILE_NAME) as ledger:
        tally = Tally("sampler-a", {Verdict.TRAINED: 4, Verdict.STALE: 3})
        ledger.execute("INSERT INTO facts VALUES (?, ?, ?)", row_of(tally))
        ledger.execute("INSERT INTO versions VALUES (3, x'00', ?)", [1e9 + 5.5])
        ledger.execute(
            "INSERT INTO evaluations VALUES "
            "(2, 0, 8, 1, 0.0, 16, 0.0, 1.0, 8, 0, 0.75, 0.1, 0.0, 9.0, '{}', '', 8, 1, '', '')"
        )
    ledger.close()
    return tmp_path


def written(out: Path, *arguments: str) -> str:
    assert main(["report", *arguments, "--out", str(out)]) == ExitCode.DRAINED
    return out.read_text()


def test_a_report_has_the_runs_curves_scores_verdicts_and_changes(run_dir: Path) -> None:
    page = written(run_dir / "report.html", str(run_dir))
    assert "Run run-1" in page
    for heading in ("Reward", "KL(behaviour", "Staleness", "Lag, seconds", "Held-out", "Groups by verdict"):
        assert heading in page
    assert "4 groups of 1 samplers, 400 completion tokens" in page
    assert "version 2: 0.7500 +- 0.1000" in page
    assert "rollback to version 2" in page
    assert "learning_rate 1e-06 -&gt; 5e-07" in page
    assert "grpo" in page
    assert "hidden" not in page
    pictures = re.findall(r"<svg.*?</svg>", page)
    assert len(pictures) >= 6
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_a_report_runs_and_loads_nothing_and_escapes_what_strangers_named(run_dir: Path) -> None:
    page = written(run_dir / "report.html", str(run_dir))
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|<img|<iframe|\bon\w+=|https?://|url\(", page)
    assert "format&lt;b&gt;" in page


def test_half_of_the_records_make_half_a_report(run_dir: Path) -> None:
    page = written(run_dir / "a.html", "--ledger", str(run_dir / Role.COORDINATOR / FILE_NAME))
    assert "Groups by verdict" in page
    assert "Staleness" not in page
    page = written(run_dir / "b.html", "--learner", str(run_dir / Role.LEARNER))
    assert "Staleness" in page
    assert "Held-out prompts</h2>" not in page


def test_a_directory_without_records_is_refused_with_what_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "x.html")]) == ExitCode.COULD_NOT_START
    assert "steps.jsonl" in capsys.readouterr().err


def test_a_long_line_is_drawn_by_means_and_a_flat_or_lonely_one_at_all() -> None:
    drawn = chart([Series("long", [(n, math.sin(n)) for n in range(100_000)])], x_label="x")
    assert len(re.findall(r"[\d.]+,[\d.]+", drawn)) <= MOST_POINTS
    for points in ([(3.0, 0.0)], [(1.0, 5.0), (2.0, 5.0)], [(1.0, -1e-9), (2.0, 1e9)]):
        ElementTree.fromstring(chart([Series("few", points)], x_label="x"))
    assert chart([Series("none", [(1.0, math.nan)])], x_label="x") == ""


def test_a_running_mean_is_of_the_newest_points() -> None:
    assert running_mean([(1, 2.0), (2, 4.0), (3, 9.0)], of=2) == [(1, 2.0), (2, 3.0), (3, 6.5)]
