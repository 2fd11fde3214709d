"""1 if the answer is the same text as a right one, whatever white space is around it."""

from collections.abc import Sequence
from typing import Final

from node.grading.completion import Graded, Row
from node.grading.grader import AnswerGrader
from node.questions.right_answer import plain_text


class ExactGrader(AnswerGrader):
    """Compares texts, stripped."""

    noise_ratio = 0.0

    def grade(self, row: Row, answers: Sequence[str | None]) -> list[Graded]:
        rights = self.right_answers(row)
        return [float(answer is not None and plain_text(answer) in rights) for answer in answers]


GRADER: Final = ExactGrader
