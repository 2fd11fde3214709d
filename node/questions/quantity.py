"""A number of a text with its unit, and when two are equal. Values are exact."""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final

Value = Decimal | Fraction

_LONGEST_DIVIDED: Final = 400
"""Digits of a number that is divided; longer ones are only compared."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of a text, or something that is made of numbers."""

    value: Value | None
    """None: something else than a number."""
    is_plain: bool = False
    """Whether it is written as one number, perhaps with a currency, a unit or a power of ten."""
    unit: str = ""
    """Its unit in one spelling; empty: none that is known."""
    is_aside: bool = False
    """Whether it stands in brackets among words, as in (see step 3)."""
    is_result: bool = False
    """Whether it follows an equals sign."""


def are_equal(given: Quantity, right: Quantity) -> bool:
    """Whether both are the same number, and of the same unit where both have a known one.

    A percentage equals its share of one, and its number without the sign, as where percent are asked for.
    """
    if given.value is None or right.value is None:
        return False
    if given.unit and right.unit and given.unit != right.unit:
        return False
    if _are_same(given.value, right.value):
        return True
    return given.unit != right.unit and _are_same(_share(given), _share(right))


def _share(quantity: Quantity) -> Value:
    assert quantity.value is not None
    if quantity.unit != "%":
        return quantity.value
    return quantity.value / 100 if isinstance(quantity.value, Fraction) else scaled(quantity.value, -2)


def _are_same(one: Value, other: Value) -> bool:
    if isinstance(one, Decimal) and isinstance(other, Decimal):
        return one == other
    fractions = fraction_of(one), fraction_of(other)
    return None not in fractions and fractions[0] == fractions[1]


def fraction_of(value: Value) -> Fraction | None:
    """Return a value as a fraction; None: it is too long to be divided."""
    if isinstance(value, Fraction):
        return value
    is_short = max(len(value.as_tuple().digits), abs(value.adjusted())) <= _LONGEST_DIVIDED
    return Fraction(value) if is_short else None


def scaled(value: Decimal, exponent: int) -> Decimal:
    """Return a value times a power of ten, exactly."""
    sign, digits, power = value.as_tuple()
    return Decimal((sign, digits, int(power) + exponent))  # not rounded, as scaleb does
