"""Graders that compare answers with the right ones of a row; reward 1 or 0.

Texts that are equal are equal before anything is read from them. Any of several right answers is right.
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from node.questions.marked_text import marked_answers
from node.questions.number_text import Quantity, are_equal, first_number, last_number
from node.questions.right_answer import right_number
from sampler.tasks.formula_check import Pair, are_worth_the_same
from sampler.tasks.formula_text import answers_in, bare, is_equal, is_quantity
from sampler.tasks.task import Graded

CUT_OFF: Final = "formulas_cut_off"
"""Metric of a group in which comparing took too long: 1 for each completion that was cut off, else 0."""


def exact(answers: Sequence[str | None], rights: Sequence[str]) -> list[Graded]:
    """Compare texts, stripped."""
    return [float(answer is not None and _text(answer) in rights) for answer in answers]


def contains(answers: Sequence[str | None], rights: Sequence[str]) -> list[Graded]:
    """Look for a right answer anywhere in the given one, as whole words and whole numbers."""
    return [
        float(answer is not None and any(_has(_text(answer), right) for right in rights))
        for answer in answers
    ]


def number(answers: Sequence[str | None], rights: Sequence[str]) -> list[Graded]:
    """Compare the number that is marked, or the last one: of ``#### 1,234``, 1234."""
    expected = [found for right in rights if (found := right_number(right)) is not None]
    return [float(answer is not None and _is_number(answer, rights, expected)) for answer in answers]


def math_verify(answers: Sequence[str | None], rights: Sequence[str]) -> list[Graded]:
    """Compare what formulas are worth, by the package ``math-verify`` within the budget of a group."""
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


BY_NAME: Final[Mapping[str, Callable[[Sequence[str | None], Sequence[str]], list[Graded]]]] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "math_verify": math_verify,
}
"""Grader -> function of the answers of a group, None where there is none, and the right answers."""


def compared_part(grader: str, answer: str, rights: Sequence[str]) -> str | None:
    """Return what of an answer ``grader`` compares, for people; None: all of it, or something else."""
    if grader == "number":
        given = _given_number(answer)
        return "nothing: no number stands there" if given is None else f"{given.value} {given.unit}".rstrip()
    if grader == "math_verify" and rights:
        candidates = [bare(answer), *answers_in(answer, right=rights[0])]
        return candidates[0] if is_equal(bare(rights[0]), candidates[0]) else candidates[-1]
    return None


def _text(answer: str) -> str:
    return unicodedata.normalize("NFC", answer).strip()


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


def _is_number(answer: str, rights: Sequence[str], expected: Sequence[Quantity]) -> bool:
    if _text(answer) in rights:
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


def _formula_verdict(answer: str, rights: Sequence[str]) -> bool | list[Pair]:
    """Return whether an answer is right, or the pairs of formulas of which one must be worth the same."""
    if _text(answer) in rights:
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
