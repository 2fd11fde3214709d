"""``heterorl-node try``: prompts, completions and grades of a task before there is a run."""

import json
import re
from pathlib import Path

import pytest

from node.commands.cli import main
from node.exit_code import ExitCode

GRADER = "support.graded_texts:share_of_digits"


@pytest.fixture
def coordinator(tmp_path: Path) -> Path:
    """Return a coordinator's configuration with eight rows, two of them held out."""
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+1=", "sum": n + 1}) + "\n" for n in range(8))
    )
    file = tmp_path / "coordinator.toml"
    file.write_text(
        f"""
        [coordinator]
        task = "jsonl"
        max_new_tokens = 6
        group_size = 8
        [coordinator.data]
        file = "{tmp_path / "sums.jsonl"}"
        evaluation_rows = 2
        [coordinator.task_options]
        prompt = "question"
        answer = "sum"
        grader = "{GRADER}"
        [sampler]
        allowed_graders = ["{GRADER}"]
        seed = 3
        """
    )
    return file


def try_it(coordinator: Path, model_dir: Path, *arguments: str) -> int:
    return main(["try", "--config", str(coordinator), "--model-dir", str(model_dir), *arguments])


def test_prompts_completions_and_grades_are_shown_with_the_share_of_groups_that_teach(
    coordinator: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert try_it(coordinator, model_dir, "-n", "9", "--json") == ExitCode.DRAINED
    shown = json.loads(capsys.readouterr().out)
    groups, summary = shown["groups"], shown["summary"]
    assert sorted(group["prompt_index"] for group in groups) == list(range(6))
    for group in groups:
        assert group["prompt"] == f"{group['prompt_index']}+1="
        assert len(group["completions"]) == 8
        for completion in group["completions"]:
            assert completion["metrics"]["row"] == group["prompt_index"] + 1
            assert 1 <= completion["tokens"] <= 6
        assert group["teaches"] is (len({one["reward"] for one in group["completions"]}) > 1)
    assert (summary["prompts"], summary["failed_prompts"], summary["tokens_max"]) == (6, 0, 6)
    assert summary["teaching_share"] > 0.5
    assert 0.0 < summary["reward_mean"] < 1.0
    assert len(summary["grader_digest"]) == 32


def test_rows_that_cannot_be_used_are_told_and_left_out(
    coordinator: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = "coordinator.task_options={prompt='question', answer='sum', grader='number'}"
    rows = coordinator.with_name("sums.jsonl")
    rows.write_text(rows.read_text().replace('"sum": 1}', '"sum": "none"}'))
    assert try_it(coordinator, model_dir, "-n", "6", "--set", wrong) == ExitCode.DRAINED
    shown, warned = capsys.readouterr()
    assert re.search(
        r"warning: 1 of 8 rows cannot be used: 1 as row 0 of sums.jsonl, whose column 'sum' is not one "
        r"number, .*: 'none'; a run leaves them out",
        warned,
    )
    assert "prompt 0," not in shown
    assert "prompt 1, 4 tokens: teaches" in shown
    assert "right answer | 2\n" in shown
    assert re.search(r"\| .*\ngraded \| .*\ncompared \| (\d+|nothing: no number stands there)\n", shown)
    assert "| 1+1=\n" in shown
    assert "5 prompts, 0 failed" in shown


def test_what_was_graded_of_each_completion_is_shown_and_why_one_has_no_answer(
    coordinator: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "coordinator.task_options={prompt='question', answer='sum', "
        "answer_from='pattern', answer_pattern='(1)'}"
    )
    assert try_it(coordinator, model_dir, "-n", "6", "--set", options, "--json") == ExitCode.DRAINED
    for group in json.loads(capsys.readouterr().out)["groups"]:
        assert group["right_answers"] == [str(group["prompt_index"] + 1)]
        for one in group["completions"]:
            has_answer = "1" in one["text"]
            assert one.get("graded") == ("1" if has_answer else None)
            assert one.get("no_answer") == (None if has_answer else "answer_pattern matches nothing in it")
    assert try_it(coordinator, model_dir, "-n", "6", "--set", options) == ExitCode.DRAINED
    assert re.search(r"\| [^\n]*\nno answer: answer_pattern matches nothing in it\n", capsys.readouterr().out)


@pytest.mark.parametrize("prompts", [None, 7, 20])
def test_a_task_that_counts_its_own_prompts_says_which_number_the_run_needs(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str], prompts: int | None
) -> None:
    file = tmp_path / "own.toml"
    configured = "" if prompts is None else f"prompts = {prompts}"
    file.write_text(
        f"""
        [coordinator]
        task = "t"
        {configured}
        [sampler]
        custom_tasks = {{ t = "support.bad_prompts:Fine" }}
        """
    )
    try_it(file, model_dir, "-n", "1", "--json")
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["prompts_to_set"] == (None if prompts == 20 else 20)


def test_a_grader_that_cannot_be_imported_is_told_before_the_model_is_loaded(
    coordinator: Path, tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "coordinator.task_options={prompt='question', grader='nowhere:grade'}",
        'sampler.allowed_graders=["nowhere:grade"]',
        "sampler.engine=nowhere:engine",
    ]
    assert try_it(coordinator, model_dir, *(each for flag in flags for each in ("--set", flag))) == (
        ExitCode.CONFIGURATION
    )
    assert "No module named 'nowhere'" in capsys.readouterr().err
    assert try_it(coordinator, tmp_path / "none") == ExitCode.COULD_NOT_START
    assert "No such file" in capsys.readouterr().err
