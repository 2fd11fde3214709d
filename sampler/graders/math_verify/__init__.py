"""1 if both are the same text, or their formulas are worth the same by the package ``math-verify``."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

from node.grading.completion import Graded, Row
from node.grading.grader import TIMED_NOISE, AnswerGrader
from node.questions.data_row import RowError, column_of
from node.questions.marked_text import marked_answers
from node.questions.right_answer import plain_text
from sampler.graders.math_verify.formula_check import Pair, are_worth_the_same, warm
from sampler.graders.math_verify.formula_equality import is_equal, is_quantity
from sampler.graders.math_verify.formula_text import answers_in, bare

CUT_OFF: Final = "formulas_cut_off"
"""Metric of a group in which comparing took too long: 1 for each completion that was cut off, else 0."""

_WRAPPING: Final = re.compile(
    r"\\(?:boxed|fbox|text|left|right|displaystyle)(?![A-Za-z])|\\[()\[\],;! ]|[$\s{}()\[\]]"
)
"""Signs around formulas that say nothing."""


class MathVerifyGrader(AnswerGrader):
    """Compares what formulas are worth, within the budget of a group. Equal texts need no formula."""

    package = "math_verify"
    noise_ratio = TIMED_NOISE

    def check_row(self, row: Row) -> None:
        name = self.question.answer
        if not any(map(_says_something, self.right_answers(row))):
            raise RowError(name, "has neither a formula nor words", value=column_of(row, name))

    def start(self, local: Mapping[str, Any]) -> None:
        """Warm up before there is a group that it would be counted against."""
        warm()

    def grade(self, row: Row, answers: Sequence[str | None]) -> list[Graded]:
        rights = self.right_answers(row)
        verdicts = [None if answer is None else _formula_verdict(answer, rights) for answer in answers]
        worth = are_worth_the_same([pair for each in verdicts if isinstance(each, list) for pair in each])
        rewards: list[float] = []
        cut_off: list[float] = []
        for verdict in verdicts:
            found = [worth[pair] for pair in verdict] if isinstance(verdict, list) else [bool(verdict)]
            rewards.append(float(True in found))
            cut_off.append(float(True not in found and None in found))
        if not any(cut_off):
            return list(rewards)
        return [(reward, {CUT_OFF: cut}) for reward, cut in zip(rewards, cut_off, strict=True)]

    def compared_part(self, answer: str, rights: Sequence[str]) -> str | None:
        if not rights:
            return None
        candidates = [bare(answer), *answers_in(answer, right=rights[0])]
        return candidates[0] if is_equal(bare(rights[0]), candidates[0]) else candidates[-1]


def _formula_verdict(answer: str, rights: Sequence[str]) -> bool | list[Pair]:
    """Return whether an answer is right, or the pairs of formulas of which one must be worth the same."""
    if plain_text(answer) in rights:
        return True
    pairs: list[Pair] = []
    for right in rights:
        right = next((each.text for each in marked_answers(right) if not each.is_sentence), right)
        expected = bare(right)
        whole = bare(answer)
        verdict = is_equal(expected, whole)
        if verdict:
            return True
        if verdict is False and is_quantity(expected) and is_quantity(whole):
            continue  # 5 pears are not the 5 of 5 apples
        undecided: list[Pair] = []
        for text in list(answers_in(answer, right=right)) or [answer]:
            given = bare(text)
            verdict = is_equal(expected, given)
            if verdict:
                return True
            undecided = [(expected, given)] if verdict is None else []
        pairs += undecided
    return pairs


def _says_something(text: str) -> bool:
    said = _WRAPPING.sub("", text)
    return any(
        unicodedata.category(each)[0] in "LN" or unicodedata.category(each) in ("Sm", "So") for each in said
    )


GRADER: Final = MathVerifyGrader
