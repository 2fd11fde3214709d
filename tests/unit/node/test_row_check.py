"""One check of a row for every built-in task, and the tally of what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from node.coordinator.data.rows import RowCheck, Rows
from node.grading.jsonl_options import JsonlOptions
from node.kinds.noise_mask.row import NoiseMaskOptions
from node.kinds.ranking.row import RankingOptions
from node.questions.data_row import MOST_KINDS, RowError, RowTally
from node.tasks.task_options import TaskOptions
from support.refusals import naming

CODE = JsonlOptions.model_validate({"grader": "code", "code": {"tests": "asserts", "prefix": "p"}})
STDIN = JsonlOptions.model_validate({"grader": "code", "code": {"tests": "stdin"}})
JUDGE = JsonlOptions.model_validate(
    {"grader": "judge", "judge": {"model": "m", "template": "{completion}", "score_key": "s"}}
)
ASKED: dict[str, Any] = {"prompt": "1+1", "answer": "2", "p": ""}
RANKED: dict[str, Any] = {"query": "q", "candidates": ["a", "b"], "relevance": [0, 1]}
IMAGE: dict[str, Any] = {"image": [[0, 255]], "label": 3}


@pytest.mark.parametrize(
    ("options", "row"),
    [
        (JsonlOptions(), ASKED),
        (JsonlOptions(grader="number"), {**ASKED, "answer": 42.0}),
        (JsonlOptions(grader="mine:f"), {"prompt": "x"}),
        (JUDGE, {"prompt": "x"}),
        (CODE, {**ASKED, "answer": ["assert f(1) == 2"]}),
        (STDIN, {**ASKED, "answer": '{"inputs": ["1"], "outputs": ["2"]}'}),
        (RankingOptions(), RANKED),
        (NoiseMaskOptions(), IMAGE),
    ],
)
def test_a_row_of_each_task_is_taken(options: TaskOptions, row: dict[str, Any]) -> None:
    options.check_row(row)


@pytest.mark.parametrize(
    ("options", "row", "said"),
    [
        (JsonlOptions(), {**ASKED, "answer": None}, "column 'answer' is null"),
        (JsonlOptions(), {**ASKED, "answer": ""}, "column 'answer' is empty"),
        (JsonlOptions(), {"prompt": "x"}, "column 'answer' is missing: the row has prompt"),
        (JsonlOptions(), {}, "column 'prompt' is missing: the row has none"),
        (JsonlOptions(grader="number"), {**ASKED, "answer": "three"}, "column 'answer' is not one number"),
        (JUDGE, {"prompt": ""}, "column 'prompt' is empty"),
        (JsonlOptions(tools="t"), {**ASKED, "t": 1}, "column 't' is not a list of tools"),
        (CODE, {**ASKED, "answer": []}, "column 'answer' has no tests"),
        (CODE, {**ASKED, "answer": "f("}, "column 'answer' has tests that are not Python"),
        (CODE, {**ASKED, "answer": "print(1)"}, "column 'answer' has tests without an assert"),
        (CODE, {**ASKED, "answer": [1]}, "column 'answer' has tests that cannot be used"),
        (CODE, {**ASKED, "answer": "assert f()", "p": None}, "column 'p' is null, not a text"),
        (STDIN, {**ASKED, "answer": "nothing"}, "column 'answer' has tests that cannot be used"),
        (STDIN, {**ASKED, "answer": {"inputs": ["1"], "outputs": [""]}}, "there are no tests"),
        (RankingOptions(), {**RANKED, "query": None}, "column 'query' is null, not a text"),
        (RankingOptions(), {**RANKED, "candidates": []}, "column 'candidates' is an empty list"),
        (RankingOptions(), {**RANKED, "candidates": ["a", None]}, "column 'candidates' has null in it"),
        (RankingOptions(), {**RANKED, "relevance": [1]}, "a number for each candidate"),
        (RankingOptions(), {**RANKED, "relevance": [0, 0]}, "has no number above 0"),
        (RankingOptions(), {**RANKED, "relevance": ["0", 1]}, "has something else in it than numbers"),
        (NoiseMaskOptions(), {**IMAGE, "label": None}, "column 'label' is not the number of a class"),
        (NoiseMaskOptions(), {**IMAGE, "image": [[0.5]]}, "column 'image' is not rows of whole numbers"),
        (NoiseMaskOptions(), {**IMAGE, "image": "?"}, "column 'image' is not rows of whole numbers"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_by_its_column(
    options: TaskOptions, row: dict[str, Any], said: str
) -> None:
    with naming(RowError, said):
        options.check_row(row)


def test_faults_are_counted_by_kind_the_most_frequent_first() -> None:
    tally = RowTally(checked=9)
    tally.add(RowError("a", "is empty"), "row 1 of d")
    for place in (3, 4):
        tally.add(RowError("q", "is a number, not a text", value=place), f"row {place} of d")
    assert tally.summary() == (
        "3 of 9 rows cannot be used: 2 as row 3 of d, whose column 'q' is a number, not a text: 3; "
        "1 as row 1 of d, whose column 'a' is empty"
    )
    assert RowTally(checked=9).summary() == ""


def test_the_tally_does_not_grow_with_the_rows() -> None:
    tally = RowTally()
    for place in range(1000):
        tally.add(RowError("a", f"is {place}"), f"row {place}")
    assert (len(tally.faults), tally.unusable) == (MOST_KINDS + 1, 1000)


def test_rows_that_cannot_be_used_keep_their_numbers_and_are_told_apart(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "answer": answer} for answer in ("1", None, "2", "", "3")]
    (tmp_path / "d").write_text("\n".join(map(json.dumps, rows)))
    with (tmp_path / "d").open("rb") as file:
        indexed = Rows(file, name="d", evaluation_rows=1, check=RowCheck(JsonlOptions()))
    assert [indexed.is_usable(index) for index in range(5)] == [True, False, True, False, True]
    assert (indexed.tally.checked, indexed.tally.unusable, indexed.prompts) == (5, 2, 4)


def test_checking_is_bounded_in_time_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.coordinator.data.rows.TOLD_EVERY_ROWS", 50)
    (tmp_path / "d").write_text('{"prompt": ""}\n' * 151)
    now_s, told = [0.0], []

    def tell(rows: int) -> None:
        told.append(rows)
        now_s[0] += 6.0

    check = RowCheck(JsonlOptions(grader="mine:f"), told=tell, limit_s=10.0, clock=lambda: now_s[0])
    with (tmp_path / "d").open("rb") as file:
        rows = Rows(file, name="d", check=check)
    assert (len(rows), rows.tally.checked, told) == (151, 100, [50, 100])
