"""The right answers of a row, and whether the run's grader can compare anything with them.

Called for each row before a run starts, by ``try`` and by samplers. Packages that only samplers have are not
needed: a text that no formula is read from can still be given word for word.
"""

import math
import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from node.questions.marked_text import marked_answers
from node.questions.number_text import Quantity, one_number
from node.questions.row_error import RowError, found_in
from node.task_options import JsonlOptions, column_of

_WRAPPING: Final = re.compile(
    r"\\(?:boxed|fbox|text|left|right|displaystyle)(?![A-Za-z])|\\[()\[\],;! ]|[$\s{}()\[\]]"
)
"""Signs around formulas that say nothing."""


def right_answers(row: Mapping[str, Any], options: JsonlOptions) -> tuple[str, ...]:
    """Return the right answers of ``row``, any of which is right; none where the grader reads no column.

    Raises:
        RowError: the row has no right answer for this grader.
    """
    texts = answer_texts(row, options)
    if options.grader == "number" and texts and not any(map(right_number, texts)):
        raise RowError(
            options.answer,
            "is not one number, which the grader number needs (math_verify compares fractions, tuples and "
            "formulas, exact compares texts)",
            value=column_of(row, options.answer),
        )
    if options.grader == "math_verify" and not any(map(_says_something, texts)):
        raise RowError(
            options.answer, "has neither a formula nor words", value=column_of(row, options.answer)
        )
    return texts


def answer_texts(row: Mapping[str, Any], options: JsonlOptions) -> tuple[str, ...]:
    """Return the right answers of ``row`` as texts, NFC, stripped; numbers and truth values in each spelling.

    Raises:
        RowError: the row has none.
    """
    name = options.answer
    if "answer" not in options.columns:
        return ()
    value = found_in(row, name)
    if options.grader == "code":  # which reads its tests itself
        if value is None or value in ("", [], {}):
            raise RowError(name, "has no tests")
        return ()
    is_list = isinstance(value, list | tuple)
    texts = [
        text for each in (value if is_list else [value]) for text in _spellings(name, each, is_list=is_list)
    ]
    if not texts:
        raise RowError(name, "is null" if value is None else "is empty", value=value)
    return tuple(dict.fromkeys(texts))


def right_number(text: str) -> Quantity | None:
    """Return the number that a right answer is, where it is marked as in ``reasoning #### 42``, or in all."""
    for marked in marked_answers(text):
        found = one_number(marked.text)
        if found is not None or not marked.is_sentence:
            return found
    return one_number(text)


def _spellings(name: str, value: Any, *, is_list: bool) -> list[str]:
    """Return the texts that say ``value``, none for nothing; pandas makes floats of a column of integers."""
    match value:
        case None:
            return []
        case bool():
            return [str(value), str(value).lower()]
        case int():
            try:
                return [str(value)]
            except ValueError:
                raise RowError(name, "is an integer of more than 4300 digits, give it as a text") from None
        case float() if math.isnan(value):
            return []
        case float() if math.isinf(value):
            raise RowError(name, "is infinite", value=value)
        case float():
            shown = repr(value)
            whole = str(int(Decimal(shown))) if value.is_integer() else f"{Decimal(shown):f}"
            return [whole, shown]
        case str():
            text = unicodedata.normalize("NFC", value).strip()
            return [text] if text else []
        case _:
            what = f"{'a list with ' if is_list else ''}{type(value).__name__}"
            raise RowError(name, f"is {what}, not a text or a number", value=value)


def _says_something(text: str) -> bool:
    said = _WRAPPING.sub("", text)
    return any(
        unicodedata.category(each)[0] in "LN" or unicodedata.category(each) in ("Sm", "So") for each in said
    )
