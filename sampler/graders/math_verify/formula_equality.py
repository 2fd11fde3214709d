"""Whether two texts are equal, or differ whatever their formulas are worth.

What remains undecided, None, is for a package that knows mathematics.
"""

import re
from decimal import Decimal
from typing import Final

from node.questions.number_text import quantities
from node.questions.quantity import Quantity, are_equal
from node.questions.units import unit_of
from sampler.graders.math_verify.formula_text import brackets_of, choice_of, is_words

LONGEST: Final = 2000
"""Characters of a text that is compared as a formula; a longer one is right only word for word."""

_NO_FORMULA: Final = [
    re.compile(pattern)
    for pattern in (
        r"\d{1,2}:\d{2}(:\d{2})?( ?[AaPp]\.?[Mm]\.?)?",
        r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}",
        r"\d+([.,]\d+)? ?(-|\u2013|--|to) ?\d+([.,]\d+)?%?",
        r"\d+(\.\d+){2,}",
        r"[0-9A-F]+ ?_ ?\{?\d+\}?",
    )
]
"""Times, dates, ranges, version numbers, numbers with a base. As formulas, 2024-05-01 and 2023-04-01 would be
worth the same."""


def is_equal(right: str, given: str) -> bool | None:
    """Compare two texts that ``bare`` has returned; None: what they are worth as formulas decides."""
    if not right or not given:
        return False
    if _key(right) == _key(given):
        return True
    if choice_of(right):
        return choice_of(right) == (choice_of(given) or given.upper())
    if is_words(right) or is_words(given):
        return _spoken(right) == _spoken(given)
    if (equal := _are_equal_numbers(right, given)) is not None:
        return equal
    for shape in _NO_FORMULA:
        if shape.fullmatch(right) or shape.fullmatch(given):
            return _without_zeros(right) == _without_zeros(given)
    brackets = brackets_of(right), brackets_of(given)
    is_other_kind = None not in brackets and brackets[0] != brackets[1]
    return False if is_other_kind or max(len(right), len(given)) > LONGEST else None


def is_quantity(text: str) -> bool:
    """Whether ``text`` is a number with at most a few words, such as ``5 apples``."""
    found = _only_quantity(text)
    return found is not None and found.value is not None


def _key(text: str) -> str:
    text = text.replace("$", "").strip()
    return text if re.search(r"\d \d|[^\W\d_] [^\W\d_]", text) else text.replace(" ", "")


def _spoken(text: str) -> str:
    text = re.sub(r"\\(?:text|textbf|mathrm)\s?\{([^{}]*)\}", r"\1", text)
    return " ".join(re.findall(r"\w+", re.sub(r"['\u2019]", "", text.casefold())))


def _are_equal_numbers(right: str, given: str) -> bool | None:
    """Compare where both are one number, perhaps with a unit; None: they are not."""
    one, other = _only_quantity(right), _only_quantity(given)
    if one is None or other is None or one.value is None or other.value is None:
        return None
    if are_equal(other, one):
        nouns = _noun(right), _noun(given)
        return None in nouns or nouns[0] == nouns[1]
    if not one.is_plain or not other.is_plain:
        return None if one.unit == other.unit or "" in (one.unit, other.unit) else False
    return _are_close(one, other)


def _only_quantity(text: str) -> Quantity | None:
    found = quantities(text)
    words = re.findall(r"[^\W\d_]{2,}", re.sub(r"\\[A-Za-z]+", "", text))
    return found[0] if len(found) == 1 and len(words) <= 3 and "=" not in text else None


def _are_close(one: Quantity, other: Quantity) -> bool:
    """Whether two decimal fractions differ by no more than binary ones are exact."""
    assert isinstance(one.value, Decimal)
    assert isinstance(other.value, Decimal)
    if one.unit != other.unit or max(abs(one.value.adjusted()), abs(other.value.adjusted())) > 300:
        return False
    both = float(one.value), float(other.value)
    return not any(each.is_integer() for each in both) and abs(both[0] - both[1]) <= 1e-9 * max(
        map(abs, both)
    )


def _noun(text: str) -> str | None:
    """Return the word that a number counts, in the singular; None: none, or a unit."""
    match = re.fullmatch(r"\S*\d\S*\s+([^\W\d_]{3,})", text)
    return None if match is None or unit_of(match[1]) else match[1].lower().rstrip("s")


def _without_zeros(text: str) -> str:
    text = re.sub(r"[{}]", "", text.lower().replace(".m", "m"))
    text = re.sub(r"\s*(?:\u2013|--|to|-)\s*", "-", text.strip())
    return re.sub(r"(?<![\d.,])0+(?=\d)", "", text).replace(" ", "").rstrip(".")
