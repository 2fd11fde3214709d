from typing import Any

import pytest

from node.grading.jsonl_options import JsonlOptions
from node.questions.data_row import RowError
from support.refusals import naming


def rights(value: Any, **options: Any) -> tuple[str, ...]:
    return texts_of({"answer": value}, **options)


def texts_of(row: dict[str, Any], **options: Any) -> tuple[str, ...]:
    """Return the right answers of a row that its grader takes."""
    grader = JsonlOptions(**options).made_grader
    grader.check_row(row)
    return grader.right_answers(row)


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("  Paris\n", ("Paris",)),
        ("e\N{COMBINING ACUTE ACCENT}", ("\N{LATIN SMALL LETTER E WITH ACUTE}",)),
        (7, ("7",)),
        (10**400, (str(10**400),)),
        (42.0, ("42", "42.0")),
        (0.1, ("0.1",)),
        (1e-05, ("0.00001", "1e-05")),
        (1e21, ("1" + "0" * 21, "1e+21")),
        (-0.0, ("0", "-0.0")),
        (True, ("True", "true")),
        (["a", "b", "a"], ("a", "b")),
        ([1, None, " "], ("1",)),
    ],
)
def test_an_answer_is_a_text_in_each_of_its_spellings(value: Any, texts: tuple[str, ...]) -> None:
    assert rights(value) == texts


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (None, "is null"),
        (float("nan"), "is empty"),
        (float("inf"), "is infinite"),
        ("", "is empty"),
        (" \n", "is empty"),
        ([], "is empty"),
        ([None, ""], "is empty"),
        ({"a": 1}, "is dict, not a text or a number"),
        ([["a"]], "is a list with list, not a text or a number"),
        ([{"a": 1}], "is a list with dict, not a text or a number"),
        pytest.param(10**5000, "is an integer of more than 4300 digits, give it as a text", id="digits"),
    ],
)
def test_a_row_without_a_right_answer_is_refused_by_a_rule_that_can_be_counted(value: Any, rule: str) -> None:
    for grader in ("exact", "contains", "number", "math_verify"):
        with pytest.raises(RowError) as error:
            rights(value, grader=grader)
        assert (error.value.column, error.value.rule) == ("answer", rule)


@pytest.mark.parametrize(
    "value",
    ["3/4", "\\frac{1}{2}", "12:30", "(2, 5)", "2024-05-01", "seven", "1, 2", "10-20", "x + 1", ["a", "b"]],
)
def test_number_needs_a_row_whose_answer_is_one_number(value: Any) -> None:
    with naming(RowError, "'answer'", "number"):
        rights(value, grader="number")


@pytest.mark.parametrize(
    "value", [7, "7", "x = 7", "2 * 617 = 1234\n#### 1,234", "\\boxed{5}", "$18", ["4", "four"]]
)
def test_number_takes_an_answer_with_work_before_a_mark(value: Any) -> None:
    assert rights(value, grader="number")


@pytest.mark.parametrize("value", ["$", "$$", "\\boxed{}", "???", "{}", "."])
def test_math_verify_needs_something_that_can_be_said(value: str) -> None:
    with pytest.raises(RowError, match="has neither a formula nor words"):
        rights(value, grader="math_verify")


@pytest.mark.parametrize(
    "value", ["x", "DNE", "\\infty", "\N{INFINITY}", "\N{EMPTY SET}", "$18 or $20", "北京"]
)
def test_math_verify_takes_what_can_be_given_word_for_word(value: str) -> None:
    assert rights(value, grader="math_verify") == (value,)


def test_a_grader_that_reads_no_answer_needs_none() -> None:
    assert texts_of({}, grader="mine:grade") == ()
    judge: dict[str, Any] = {"model": "wise", "template": "{completion}", "score_key": "score"}
    assert texts_of({}, grader="judge", judge=judge) == ()
    code: dict[str, Any] = {"grader": "code", "code": {}, "answer": "t"}
    assert texts_of({"t": ["assert f()"]}, **code) == ()
    with naming(RowError, "'t'"):
        texts_of({"t": []}, **code)


def test_a_column_that_is_not_there_is_said_with_those_that_are() -> None:
    with naming(RowError, "'right'", "q, answer"):
        texts_of({"q": "?", "answer": 1}, answer="right")
