"""Verdicts of the graders that compare an answer with the right one."""

from typing import Any

import pytest

from sampler.tasks import formula_check
from sampler.tasks.answer_graders import CUT_OFF
from sampler.tasks.formula_check import are_worth_the_same
from sampler.tasks.question_tasks import JsonlTask
from sampler.tasks.task import CompletionText

MATH_VERIFY: list[tuple[Any, str, int]] = [
    ("12:30", "10:30", 0),
    ("12:30", "12:30", 1),
    ("9:05", "The answer is 09:05.", 1),
    ("2024-05-01", "2023-04-01", 0),
    ("2024-05-01", "2024-05-01", 1),
    ("10-20", "20-30", 0),
    ("10-20", "10\N{EN DASH}20", 1),
    ("no", "on", 0),
    ("no", "No.", 1),
    ("(1,2)", "\\{1,2\\}", 0),
    ("\\{1,2\\}", "1, 2", 1),
    ("(2,5)", "(9,5)", 0),
    ("5", "(9, 5)", 0),
    ("5", "The point is (9, 5).", 0),
    ("3", "3 or 4", 0),
    ("4", "It is 3 or 4", 0),
    ("4", "\\boxed{3 or 4}", 0),
    ("10 km", "10 m", 0),
    ("10 km", "10 kilometers", 1),
    ("$18", "€18", 0),
    ("5 apples", "5 pears", 0),
    ("5 apples", "5", 1),
    ("5", "5 apples", 1),
    ("0.0000001", "0.0000002", 0),
    ("B", "(B)", 1),
    ("B", "The correct option is (B).", 1),
    ("B", "Option B is correct", 1),
    ("B", "B. Paris", 1),
    ("B", "A or B", 0),
    ("(B)", "B", 1),
    ("B", "\\boxed{\\text{B}}", 1),
    ("B", "b", 1),
    ("C", "The answer is D", 0),
    ("A", "A dog", 0),
    ("A", "This is a test", 0),
    ("x^2+1", "So it is $1+x^2$.", 1),
    ("x^2+1", "So it is x^2 + 1.", 1),
    ("\\frac{3}{4}", "3/4", 1),
    ("3/4", "1/4", 0),
    ("3/4", "0.75", 1),
    ("3/4", "\\dfrac{3}{4}", 1),
    ("3/4", "75%", 1),
    ("3, 4", "\\boxed{3} and \\boxed{4}", 1),
    ("3, 4", "\\boxed{4}, \\boxed{3}", 1),
    ("3", "\\boxed{4} \\boxed{3}", 1),
    ("4", "#### 4\nbecause 2+3 = 5", 1),
    ("5", "#### 4\nbecause 2+3 = 5", 0),
    ("4", "Answer: 4\nI used 3 steps", 1),
    ("\\text{Monday}", "Monday", 1),
    ("Monday", "\\boxed{\\text{monday}}", 1),
    ("\\pi", "π", 1),
    ("[0,\\infty)", "[0, ∞)", 1),
    ("\\sqrt{2}", "√2", 1),
    ("x \\ge 3", "x ≥ 3", 1),
    ("x>3", "x<3", 0),
    ("1/3", "0.333333", 1),
    ("yes", "Yes", 1),
    ("yes", "no", 0),
    ("7", "<think>\\boxed{3}</think> 7", 1),
    ("3", "<think>\\boxed{3}</think> 7", 0),
    ("2:3", "4:6", 1),
    ("2x", "2y", 0),
    ("-3", "\N{MINUS SIGN}3", 1),
    ("42", "\N{FULLWIDTH DIGIT FOUR}\N{FULLWIDTH DIGIT TWO}", 1),
    ("2\\pi", "2\\pi \\text{ cm}", 1),
    ("2\\pi", "2 \\pi", 1),
    ("\\frac{1}{2}", "\\frac 12", 1),
    ("5", "$x = 5$ cm", 1),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "$\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}$", 1),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "$\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}$", 0),
    ("(-\\infty, 2)\\cup(3,\\infty)", "$(3,\\infty)\\cup(-\\infty,2)$", 1),
    ("1,234", "1,235", 0),
    ("1.5\\times10^3", "1500", 1),
    ("50%", "0.5", 1),
    ("50%", "50", 1),
    ("50%", "5%", 0),
    ("90^\\circ", "90", 1),
    ("90^\\circ", "90 degrees", 1),
    ("x=1", "x=2", 0),
    ("(2, -1)", "The vertex is at (2, -1).", 1),
    ("(2, -1)", "$(2,-1)$", 1),
    ("(2,-1)", "(-1,2)", 0),
    ("3\\sqrt{2}", "3*sqrt(2)", 1),
    ("sin(x)", "\\sin x", 1),
    ("$5.00", "$5", 1),
    ("$5", "\\$5", 1),
    ("3.5 million", "3500000", 1),
    ("No solution", "\\boxed{\\text{No solution}}", 1),
    ("\\emptyset", "∅", 1),
    (["1/2", "x"], "0.5", 1),
]

NUMBER: list[tuple[Any, str, int]] = [
    ("42", "\\boxed{42}", 1),
    ("42", "Answer: 42 apples (6 boxes of 7)", 1),
    ("42", "The answer is 42. I checked in 3 steps.", 1),
    ("5", "3 or 5", 0),
    ("5", "2.5", 0),
    ("4", "1/4", 0),
    ("30", "12:30", 0),
    ("5", "(9, 5)", 0),
    ("1", "2024-05-01", 0),
    ("2", "\\frac{1}{2}", 0),
    ("0.25", "1/4", 1),
    ("10 km", "10 m", 0),
    ("10 km", "10 km", 1),
    ("$18", "18 dollars", 1),
    ("$18", "€18", 0),
    ("50%", "50", 1),
    ("50%", "0.5", 1),
    ("12", "12.", 1),
    ("7", "\\boxed{3} then \\boxed{7}", 1),
    ("3", "\\boxed{3} then \\boxed{7}", 0),
    ("12", "#### 12\n#### 13", 0),
    ("Room 5", "5", 1),
    ("5", "x = 5", 1),
    ("5", "5 = x", 1),
    ("20", "10-20", 0),
    ("3", "2^3", 0),
    ("8", "2^3", 0),
    ("2000", "2 thousand", 1),
    ("3", "version 1.2.3", 0),
    ("42", "**42**", 1),
    ("42", "forty-two", 0),
    ("42", "<answer>42</answer>", 1),
    ("7", "$3 + 4 = 7$", 1),
    ("1000000", "1 million", 1),
    ("2", "Step 2", 1),
    ([2, 5], "5", 1),
]

EXACT: list[tuple[Any, str, int]] = [
    ("é", "é", 1),
    (["a", "b"], "b", 1),
]

CONTAINS: list[tuple[Any, str, int]] = [
    ("Paris", "It is Paris.", 1),
    ("北京", "答案是北京市", 1),
    ("3.5", "it is 13.5", 0),
    ("4", "4.5", 0),
    ("4", "-4", 0),
    ("4", "It is 4.", 1),
    ("cat", "concatenate", 0),
    ("C++", "use C++!", 1),
]

BARE = [
    "1/2",
    "\\frac{1}{2}",
    "\\sqrt{2}",
    "2\\pi",
    "x^2+1",
    "(1,2)",
    "[1,2)",
    "7.41\\%",
    "B",
    "Monday",
    "\\{1,2\\}",
    "10\\text{ cm}",
    "-3",
    "3\\times10^8",
    "1+2i",
    "\\text{yes}",
    "2:3",
    "x=5",
    "\\infty",
    "No solution",
    "DNE",
    "$18",
    "12:30",
    "2024-05-01",
    "10-20",
    "x \\le 2",
    "50%",
    "5 ft 3 in",
    "$18 or $20",
    "1.2.3",
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
]


def verdict(grader: str, right: Any, said: str, **options: Any) -> Any:
    task = JsonlTask(prompt="q", answer="a", grader=grader, **options)
    return task.grade(0, {"q": "?", "a": right}, CompletionText(said, 1, "end"))


@pytest.mark.parametrize(("right", "said", "reward"), EXACT)
def test_exact_compares_texts(right: Any, said: str, reward: int) -> None:
    assert verdict("exact", right, said) == reward


@pytest.mark.parametrize(("right", "said", "reward"), CONTAINS)
def test_contains_looks_for_whole_words_and_numbers(right: Any, said: str, reward: int) -> None:
    assert verdict("contains", right, said) == reward


@pytest.mark.parametrize(("right", "said", "reward"), NUMBER)
def test_number_compares_no_part_of_anything_else(right: Any, said: str, reward: int) -> None:
    assert verdict("number", right, said) == reward


@pytest.mark.parametrize(("right", "said", "reward"), MATH_VERIFY)
def test_math_verify_compares_what_formulas_are_worth(right: Any, said: str, reward: int) -> None:
    assert verdict("math_verify", right, said) == reward


@pytest.mark.parametrize("right", BARE)
@pytest.mark.parametrize(
    ("answer_from", "said"),
    [
        ("tags", "<answer>{}</answer>"),
        ("last_line", "So:\n{}"),
        ("boxed", "It is \\boxed{{{}}}."),
        ("text", "{}"),
        ("text", "The answer is {}."),
        ("text", "${}$"),
        ("text", "\\boxed{{{}}}"),
        ("text", "Some steps with 1 = 1.\n#### {}"),
        ("text", "**Answer:** {}"),
    ],
)
def test_an_answer_that_is_the_right_text_is_right_however_it_is_marked(
    answer_from: str, said: str, right: str
) -> None:
    """Nothing is parsed for it: the package may be missing. Before, 14 of 19 got 0 where they stood bare."""
    assert verdict("math_verify", right, said.format(right), answer_from=answer_from) == 1.0


BOMB = "\\boxed{9^{9^{9^{9}}}}"


def test_formulas_that_take_for_ever_cost_their_group_one_budget_and_the_others_no_reward() -> None:
    task = JsonlTask(prompt="q", answer="a", grader="math_verify")
    texts = [BOMB, "\\boxed{\\frac{8}{2}}", BOMB.replace("9", "8"), BOMB, "\\boxed{5}", "\\boxed{2+2}"]
    graded = task.grade_group(0, {"q": "?", "a": "4"}, [CompletionText(text, 1, "end") for text in texts])
    assert graded == [
        (0.0, {CUT_OFF: 1.0}),
        (1.0, {CUT_OFF: 0.0}),
        (0.0, {CUT_OFF: 1.0}),
        (0.0, {CUT_OFF: 1.0}),
        (0.0, {CUT_OFF: 0.0}),
        (1.0, {CUT_OFF: 0.0}),
    ]


def test_a_budget_is_for_the_whole_group_and_each_formula_is_compared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formula_check, "BASE_S", 0.0)
    monkeypatch.setattr(formula_check, "EACH_S", 0.0)
    assert are_worth_the_same([("4", "2+2")] * 3) == {("4", "2+2"): None}
    assert are_worth_the_same([]) == {}
