"""Graders that compare an answer with the right one; reward 1 or 0. Options name them as they are here."""

import re
from decimal import Decimal
from typing import Final

_MINUS: Final = "\N{MINUS SIGN}"
_FORMULA_LIMIT_S: Final = 2
"""Longest time to read or to compare a formula; beyond it the answer is wrong. With the package's own 5 s
eight completions such as 9^(9^(9^9)) reach the limit of their group, and their prompt is blamed."""

_NUMBER: Final = re.compile(
    rf"(?:(?<![\w)])[-{_MINUS}])?(?:(?:\d{{1,3}}(?:,\d{{2,3}})*,\d{{3}}(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,4}(?!\d))?"
)
"""A minus after a number or a bracket subtracts and is no sign. A comma belongs to a number of thousands."""


def exact(answer: str, right: str) -> float:
    """Compare texts, stripped."""
    return float(answer == right.strip())


def contains(answer: str, right: str) -> float:
    """Look for the right answer anywhere in the given one."""
    return float(right.strip() in answer)


def number(answer: str, right: str) -> float:
    """Compare the last numbers: ``#### 1,234`` equals ``It is 1234.00.``; ValueError without a right one."""
    if (expected := _last_number(right)) is None:
        raise ValueError(f"the right answer {right!r:.100} has no number")
    return float(_last_number(answer) == expected)


def math_verify(answer: str, right: str) -> float:
    """Compare what formulas are worth, by the package ``math-verify``."""
    from math_verify import parse, verify  # an extra: imported only where it is used

    gold = right if "$" in right or "\\boxed" in right else f"${right}$"
    given = parse(answer, parsing_timeout=_FORMULA_LIMIT_S)
    return float(verify(parse(gold), given, timeout_seconds=_FORMULA_LIMIT_S))


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace(_MINUS, "-")) if numbers else None
