from typing import Any

import pytest

from node.questions.answer_part import AnswerPart, answer_part
from node.tasks.task_options import PromptOptions


def part(text: str, finish: str = "end", **options: Any) -> AnswerPart:
    return answer_part(text, finish, PromptOptions(**options))


@pytest.mark.parametrize(
    ("answer_from", "text", "graded"),
    [
        ("text", " 7\n", " 7\n"),
        ("text", "<think>2 plus 2</think>\n4", "\n4"),
        ("text", "First, 2 plus 2.\n</think>\n\n4", "\n\n4"),
        ("text", "[THINK]2[/THINK]4", "4"),
        ("text", "<|channel|>analysis<|message|>2 plus 2<|channel|>final<|message|>4", "4"),
        ("text", "the tag <think> opens", "the tag <think> opens"),
        ("after_thinking", "a</think>b</think>c", "c"),
        ("last_line", "<think>7\n</think>\nso\n8\n", "8"),
        ("last_line", "so\n7\n\n", "7"),
        ("last_line", "7\nor 8", "or 8"),
        ("tags", "<answer>8</answer> no, <answer> 7 </answer>.", " 7 "),
        ("tags", "<think><answer>3</answer></think><answer>4</answer>", "4"),
        ("boxed", "\\boxed{3}</think>\\boxed{4} is it, \\boxed{5}.", "5"),
        ("boxed", "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ],
)
def test_an_answer_is_taken_from_what_follows_thinking(answer_from: str, text: str, graded: str) -> None:
    assert part(text, answer_from=answer_from) == AnswerPart(graded)


@pytest.mark.parametrize(
    ("answer_from", "text", "why"),
    [
        ("text", "<think>2 plus 2 is 4", "its thinking does not end"),
        ("tags", " <think><answer>4</answer>", "its thinking does not end"),
        ("after_thinking", "2 plus 2 is 4", "it has no end of thinking, such as </think>"),
        ("last_line", "\n ", "it has no line with text"),
        ("tags", "4", "it has no <answer> before </answer>"),
        ("tags", "</answer>7<answer>", "it has no <answer> before </answer>"),
        ("tags", "<answer>4", "it has no </answer>"),
        ("boxed", "4", r"it has no \boxed{...} that is closed"),
        ("boxed", "<think>\\boxed{4}</think>", r"it has no \boxed{...} that is closed"),
    ],
)
def test_a_completion_without_an_answer_says_why(answer_from: str, text: str, why: str) -> None:
    assert part(text, "length", answer_from=answer_from) == AnswerPart(None, why)


def test_a_pattern_takes_its_first_group_of_the_last_match_in_all_of_the_text() -> None:
    options = {"answer_from": "pattern", "answer_pattern": "FINAL: (.*)"}
    assert part("FINAL: 3\nno, </think> FINAL: 4 \n", **options) == AnswerPart("4 ")
    assert part("4", **options) == AnswerPart(None, "answer_pattern matches nothing in it")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"answer_from": "pattern"}, "go together: set both or neither"),
        ({"answer_pattern": "(.*)"}, "go together: set both or neither"),
        (
            {"answer_from": "pattern", "answer_pattern": "4"},
            r"must have a group for the answer, such as FINAL: \(\.\*\)",
        ),
        ({"answer_from": "pattern", "answer_pattern": "(4"}, "is not a regular expression"),
    ],
)
def test_a_pattern_has_a_group_and_is_used(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        PromptOptions(**options)
