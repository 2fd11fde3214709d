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
from node.coordinator.work.samplers.tallies import Tally
from node.exit_code import ExitCode
from node.page.samples_file import FILE_NAME as SAMPLES
from node.page.samples_file import CompletionSample, GroupSample, SamplesFile
from node.process.last_start import note_settings
from node.step_log_parts import log_lines, part_of
from node.values.evaluation import Evaluation
from node.values.groups.verdict import Verdict
from node.values.roles import Role


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
        for fact in (
            Tally("sampler-a", {Verdict.TRAINED: 4, Verdict.STALE: 3}),
            Evaluation(
                2, 0, 8, 1, 0.0, 16, 0.0, 1.0, counted_prompts=8, reward_mean=0.75, reward_standard_error=0.1
            ),
        ):
            ledger.execute("INSERT INTO facts VALUES (?, ?, ?)", row_of(fact))
        ledger.execute("INSERT INTO versions VALUES (3, x'00', ?)", [1e9 + 5.5])
    ledger.close()
    answer = CompletionSample("<i>4</i>", 1.0, 0.5, 3, "end", 4, 4)
    group = GroupSample(5, 0.0, "5.1", "sampler-a", "addition", 7, "2 + 2 =", 5, 1, 1, (answer,))
    SamplesFile(learner / SAMPLES).append([group])
    return tmp_path


def written(out: Path, *arguments: str) -> str:
    assert main(["report", *arguments, "--out", str(out)]) == ExitCode.DRAINED
    return out.read_text()


def test_a_report_has_the_runs_curves_scores_verdicts_and_changes(run_dir: Path) -> None:
    page = written(run_dir / "report.html", str(run_dir))
    assert "Run run-1" in page
    for heading in ("What it is", "Steps", "Held-out prompts", "Groups by verdict", "Samples"):
        assert f"<h2>{heading}</h2>" in page
    for caption in ("reward: ", "KL(behaviour || learner), nats", "staleness, versions: ", "time, seconds: "):
        assert f"<figcaption>{caption}" in page
    assert re.search(r"<small>written \d{4}-\d\d-\d\d", page)
    assert "from the step to its announcement" in page
    assert "4 groups of 1 samplers, 400 completion tokens" in page
    assert re.search(r"<tr><td>2</td><td>0.750 \+- 0.100</td>.*<td>best</td></tr>", page)
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
    assert '<pre class="above">\n&lt;i&gt;4&lt;/i&gt;</pre>' in page


def test_completions_are_left_out_of_a_page_that_is_shown_to_others(run_dir: Path) -> None:
    page = written(run_dir / "report.html", str(run_dir), "--no-samples")
    assert "Samples" not in page
    assert "2 + 2 =" not in page


def test_half_of_the_records_make_half_a_report(run_dir: Path) -> None:
    page = written(run_dir / "a.html", "--ledger", str(run_dir / Role.COORDINATOR / FILE_NAME))
    assert "Groups by verdict" in page
    assert "<h2>Steps</h2>" not in page
    page = written(run_dir / "b.html", "--learner", str(run_dir / Role.LEARNER))
    assert "<h2>Steps</h2>" in page
    assert "Held-out prompts</h2>" not in page


@pytest.mark.parametrize(
    "content",
    [
        "[]\n",
        "{}\n",
        "half\n",
        '{"version": 1, "groups": [1]}\n',
        '{"version": 1, "groups": [{"group_id": "0.1", "sampler_id": "s1"}]}\n',
    ],
)
def test_a_file_that_is_not_a_log_of_steps_is_refused_by_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (run_dir / Role.LEARNER / "steps.jsonl").write_text(content)
    assert main(["report", str(run_dir), "--out", str(run_dir / "x.html")]) == ExitCode.COULD_NOT_START
    assert "line 1 of" in capsys.readouterr().err


def test_a_log_in_parts_is_read_from_its_first_part_and_older_parts_may_be_gone(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    for path, versions in ((part_of(log, version=2), (1, 2)), (part_of(log, version=3), (3,)), (log, (4,))):
        path.write_text("".join(f"{json.dumps(step(version))}\n" for version in versions))
    assert [line["version"] for line in log_lines(log)] == [1, 2, 3, 4]
    part_of(log, version=2).unlink()
    assert [line["version"] for line in log_lines(log)] == [3, 4]
