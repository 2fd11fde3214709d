import time

import pytest

from node.questions.marked_text import boxes, marked_answers


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("#### 42\nand the reasoning above confirms this.", "42"),
        ("The answer is \\boxed{42} (see step 3).", "42"),
        ("\\boxed{3} \\boxed{4}", "4"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{4}}", "4"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed 5", "5"),
        ("**Answer:** 42", "42"),
        ("**Final Answer**: 42\nThanks", "42"),
        ("The answer to the question is 42. I checked 3.", "42"),
        ("Answer:\n\n42", "42"),
        ("answer = 3.5.", "3.5"),
        ("Answer: 5, so \\boxed{6}", "6"),
        ("\\boxed{6}\n#### 7", "7"),
        ("\\boxed{4", None),
        ("the answer is not 5", None),
        ("42", None),
    ],
)
def test_the_last_mark_counts(text: str, marked: str | None) -> None:
    assert next((each.text for each in marked_answers(text)), None) == marked


def test_the_rest_of_a_sentence_may_not_be_an_answer() -> None:
    said = list(marked_answers("\\boxed{5}, so the answer is clear."))
    assert [(each.text, each.is_sentence) for each in said] == [("clear", True), ("5", False)]


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 2300, "\\boxed{" * 1100 + "}" * 1100, "answer " * 2300, "answer is " * 1600, "{" * 16_000],
)
def test_a_long_text_is_read_in_time_proportional_to_its_length(text: str) -> None:
    began = time.process_time()
    list(marked_answers(text))
    boxes(text)
    assert time.process_time() - began < 0.5
