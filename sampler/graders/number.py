"""1 if the number that is marked, or the last one, is the right one: of ``#### 1,234``, 1234."""

from collections.abc import Sequence
from typing import Final

from node.grading.completion import Graded, Row
from node.grading.grader import AnswerGrader
from node.questions.data_row import RowError, column_of
from node.questions.marked_text import marked_answers
from node.questions.number_text import first_number, last_number
from node.questions.quantity import Quantity, are_equal
from node.questions.right_answer import plain_text, right_number


class NumberGrader(AnswerGrader):
    """Compares numbers, with their units where both sides name one."""

    noise_ratio = 0.0

    def check_row(self, row: Row) -> None:
        if not any(map(right_number, self.right_answers(row))):
            raise RowError(
                self.question.answer,
                "is not one number, which the grader number needs (math_verify compares fractions, tuples "
                "and formulas, exact compares texts)",
                value=column_of(row, self.question.answer),
            )

    def grade(self, row: Row, answers: Sequence[str | None]) -> list[Graded]:
        rights = self.right_answers(row)
        expected = [found for right in rights if (found := right_number(right)) is not None]
        return [float(answer is not None and _is_number(answer, rights, expected)) for answer in answers]

    def compared_part(self, answer: str, rights: Sequence[str]) -> str | None:
        given = _given_number(answer)
        return "nothing: no number stands there" if given is None else f"{given.value} {given.unit}".rstrip()


def _is_number(answer: str, rights: Sequence[str], expected: Sequence[Quantity]) -> bool:
    if plain_text(answer) in rights:
        return True
    given = _given_number(answer) if expected else None
    return given is not None and any(are_equal(given, right) for right in expected)


def _given_number(answer: str) -> Quantity | None:
    """Return the number that a mark marks, else the last; None: what stands there is not a number."""
    for marked in marked_answers(answer):
        found = first_number(marked.text)
        if found is not None or not marked.is_sentence:
            return found
    return last_number(answer)


GRADER: Final = NumberGrader
