"""1 if a right answer stands in the given one as whole words and numbers: 4 is not in 14, nor no in know."""

import unicodedata
from collections.abc import Sequence
from typing import Final

from node.grading.completion import Graded, Row
from node.grading.grader import AnswerGrader
from node.questions.right_answer import plain_text


class ContainsGrader(AnswerGrader):
    """Looks for a right answer anywhere in the given one."""

    noise_ratio = 0.0

    def grade(self, row: Row, answers: Sequence[str | None]) -> list[Graded]:
        rights = self.right_answers(row)
        return [
            float(answer is not None and any(_has(plain_text(answer), right) for right in rights))
            for answer in answers
        ]


def _has(answer: str, right: str) -> bool:
    at = answer.find(right)
    while at >= 0:
        end = at + len(right)
        if not _continues(answer, at, before=True) and not _continues(answer, end, before=False):
            return True
        at = answer.find(right, at + 1)
    return False


def _continues(text: str, at: int, *, before: bool) -> bool:
    """Whether a word or a number goes on across ``at``; ``before``: out of what begins there."""
    if not 0 < at < len(text):
        return False
    inside, outside = (text[at], text[at - 1]) if before else (text[at - 1], text[at])
    is_unit = not before and inside.isdigit() and outside.isalpha()  # 10cm has 10
    if _is_letter(inside) and _is_letter(outside) and not is_unit:
        return True
    if not inside.isdigit():
        return False
    beyond = text[max(0, at - 2) : at - 1] if before else text[at + 1 : at + 2]
    if outside.isdigit() or (outside in ".,/:" and beyond.isdigit()):
        return True
    return before and outside in "-\N{MINUS SIGN}" and not beyond.isalnum()


def _is_letter(character: str) -> bool:
    """Whether words of its script stand apart; those of Chinese, Thai or Arabic may not."""
    return character == "_" or unicodedata.category(character) in ("Lu", "Ll", "Lt", "Lm", "Mn", "Nd")


GRADER: Final = ContainsGrader
