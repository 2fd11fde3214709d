"""The right answers of a row as texts, and the number that one is; read for each row before a run starts."""

import math
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from node.questions.data_row import RowError, found_in
from node.questions.marked_text import marked_answers
from node.questions.number_text import one_number
from node.questions.quantity import Quantity


def answer_texts(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the right answers in a column as texts, NFC, stripped; numbers and booleans in each spelling.

    Raises:
        RowError: the row has none.
    """
    value = found_in(row, name)
    is_list = isinstance(value, list | tuple)
    texts = [
        text for each in (value if is_list else [value]) for text in _spellings(name, each, is_list=is_list)
    ]
    if not texts:
        raise RowError(name, "is null" if value is None else "is empty", value=value)
    return tuple(dict.fromkeys(texts))


def plain_text(text: str) -> str:
    """Return a text as right answers are: NFC, stripped."""
    return unicodedata.normalize("NFC", text).strip()


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
            text = plain_text(value)
            return [text] if text else []
        case _:
            what = f"{'a list with ' if is_list else ''}{type(value).__name__}"
            raise RowError(name, f"is {what}, not a text or a number", value=value)
