"""Verdicts of the graders that compare an answer with the right one."""

from pathlib import Path
from typing import Any

import pytest

from sampler.graders.math_verify import CUT_OFF, formula_check
from sampler.graders.math_verify.formula_check import are_worth_the_same
from sampler.tasks.question_tasks import JsonlTask
from sampler.tasks.task import CompletionText

FILE = Path(__file__).with_name("answers.tsv")
WRITTEN = [tuple(line.split("\t")) for line in FILE.read_text().splitlines()[1:]]
"""Grader, reward, right answer, what was said: as people write them, without a language's escapes."""

OTHERS: list[tuple[str, int, Any, str]] = [
    ("exact", 1, True, "true"),
    ("exact", 1, 42, "42"),
    ("exact", 1, 3.0, "3.0"),
    ("exact", 1, ["a", "b"], "b"),
    ("exact", 1, 7, " 7\n"),
    ("number", 1, "2 * 617 = 1234\n#### 1,234", "= 1234.0"),
    ("number", 0, "5", "answer: 5\nanswer: 6"),
    ("number", 1, 42.0, "42"),
    ("number", 1, 1e21, "10^21"),
    ("number", 0, "12", "#### 12\n#### 13"),
    ("number", 1, [2, 5], "5"),
    ("math_verify", 0, "4", "#### 4\n#### 5"),
    ("math_verify", 1, "4", "Answer: 4\nAnswer: 4"),
    ("math_verify", 1, "4", "#### 4\nbecause 2+3 = 5"),
    ("math_verify", 0, "5", "#### 4\nbecause 2+3 = 5"),
    ("math_verify", 1, "4", "Answer: 4\nI used 3 steps"),
    ("math_verify", 1, ["1/2", "x"], "0.5"),
]
"""Right answers that are no texts, and texts of several lines."""

ANSWERS: dict[tuple[str, str], dict[str, float]] = {}
"""Grader and right answer -> what was said, in one group -> reward."""
for grader, reward, right, said in WRITTEN:
    if grader != "bare":
        ANSWERS.setdefault((grader, right), {})[said] = float(reward)

BARE = [right for grader, reward, right, said in WRITTEN if (grader, reward) == ("bare", "1")]
"""Right answers, each of which is said alone."""


@pytest.mark.parametrize(
    ("grader", "right", "rewards"),
    [
        *((*asked, rewards) for asked, rewards in ANSWERS.items()),
        *((grader, right, {said: float(reward)}) for grader, reward, right, said in OTHERS),
    ],
)
def test_a_grader_compares_what_an_answer_says_and_no_part_of_anything_else(
    grader: str, right: Any, rewards: dict[str, float]
) -> None:
    task = JsonlTask(prompt="q", answer="a", grader=grader)
    graded = task.grade_group(0, {"q": "?", "a": right}, [CompletionText(said, 1, "end") for said in rewards])
    assert dict(zip(rewards, graded, strict=True)) == rewards


MARKED = {
    "tags": ["<answer>{}</answer>"],
    "last_line": ["So:\n{}"],
    "boxed": ["It is \\boxed{{{}}}."],
    "text": [
        "{}",
        "The answer is {}.",
        "${}$",
        "\\boxed{{{}}}",
        "Some steps with 1 = 1.\n#### {}",
        "**Answer:** {}",
    ],
}
"""Where an answer is taken from -> how it may be marked there."""


@pytest.mark.parametrize("right", BARE)
def test_an_answer_that_is_the_right_text_is_right_however_it_is_marked(right: str) -> None:
    """Nothing is parsed for it. Before, 14 of 19 got 0 where they stood bare."""
    for answer_from, marked in MARKED.items():
        task = JsonlTask(prompt="q", answer="a", grader="math_verify", answer_from=answer_from)
        said = [CompletionText(one.format(right), 1, "end") for one in marked]
        graded = task.grade_group(0, {"q": "?", "a": right}, said)
        assert graded == [1.0] * len(marked), answer_from


BOMB = "\\boxed{9^{9^{9^{9}}}}"


def test_formulas_that_take_for_ever_cost_their_group_one_budget_and_the_others_no_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("PATIENCE", "MOST_WALL_S"):
        monkeypatch.setattr(formula_check, limit, 100.0)  # this machine may be busier than a sampler's
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
