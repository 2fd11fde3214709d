import time
from fractions import Fraction

import pytest

from node.questions.number_text import first_number, last_number, one_number, quantities
from node.questions.quantity import are_equal
from support.present import present


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("It is 1234.00.", 1234),
        ("1,234.50 dollars", Fraction("1234.5")),
        ("1,00,000", 100_000),
        ("1 000", 1000),
        ("1{,}000", 1000),
        ("1\\,000", 1000),
        ("1'000", 1000),
        ("1_000", 1000),
        ("1.234", Fraction("1.234")),
        ("\N{MINUS SIGN}3", -3),
        ("-$5", -5),
        ("$-1,000.50", Fraction("-1000.5")),
        ("= - 3", -3),
        ("- 3 apples", 3),
        ("\N{ARABIC-INDIC DIGIT FOUR}\N{ARABIC-INDIC DIGIT TWO}", 42),
        ("\N{FULLWIDTH DIGIT FOUR}\N{FULLWIDTH DIGIT TWO}", 42),
        ("1.5 x 10^3", 1500),
        ("$1.5\\times10^{3}$", 1500),
        ("5 \N{MULTIPLICATION SIGN} 10\N{SUPERSCRIPT THREE}", 5000),
        ("1.5e3", 1500),
        ("10^{-3}", Fraction(1, 1000)),
        ("5 million", 5_000_000),
        ("$5M", 5_000_000),
        ("50\\%", 50),
        ("**42**", 42),
        ("\\(5\\) apples", 5),
        ("<b>5</b>", 5),
        ("10 m^2", 10),
        ("$10$ h", 10),
        ("10cm", 10),
        ("x_{1} = 5", 5),
        ("Q3 had 5", 5),
    ],
)
def test_a_number_is_read_however_it_is_written(text: str, value: Fraction) -> None:
    found = present(one_number(text))
    assert found.value is not None
    assert Fraction(found.value) == value


@pytest.mark.parametrize(
    "text",
    [
        "3/4", "\\frac{1}{2}", "3 1/2", "3\N{VULGAR FRACTION ONE HALF}", "12:30", "12 : 30", "3pm", "3 pm",
        "2024-05-01", "1/5/2024", "May 5", "5 May", "(2, 5)", "[1,2)", "\\{1, 2\\}", "1,2,3", "3, 4",
        "1, 2, and 3",
        "7 or 8", "10 to 20", "10-20", "10\N{EN DASH}20", "between 3 and 4", "1.2.3", "1.234,56", "2x", "2 x",
        "x + 5", "2\\pi", "\\sqrt{2}", "x > 5", "2^5", "5\N{SUPERSCRIPT TWO}", "|5|", "8-5", "(2)-5",
        "5 - -3",
        "5 x 3", "a dozen", "5 dozen", "1st", "COVID-19", "seven", "", "3 apples and 4 pears",
        "1e99999999999999999",
    ],
)  # fmt: skip
def test_what_is_not_one_number_is_none(text: str) -> None:
    assert one_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 + 4 = 7.00.", 7),
        ("It is 42 (see step 3).", 42),
        ("It is 14, not 5", 14),
        ("In 2020, 5 people", 5),
        ("so 1/4", Fraction(1, 4)),
        ("first 3, at last 12:30", None),
        ("it is 3 or 4", None),
        ("no number", None),
    ],
)
def test_the_last_number_of_a_text_is_no_part_of_something_else(text: str, value: Fraction | None) -> None:
    found = last_number(text)
    assert (None if found is None or found.value is None else Fraction(found.value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42 apples (6 boxes of 7)", 42),
        ("5 + 3 = 8", 8),
        ("x = 5", 5),
        ("42, since 6*7=42", 42),
        ("12:30", None),
    ],
)
def test_the_first_number_is_what_its_equation_comes_to(text: str, value: int | None) -> None:
    found = first_number(text)
    assert (None if found is None else found.value) == value


@pytest.mark.parametrize(
    ("given", "right", "equal"),
    [
        ("10 m", "10 km", False),
        ("10 kilometers", "10 km", True),
        ("10", "10 km", True),
        ("\N{EURO SIGN}18", "$18", False),
        ("18 dollars", "$18", True),
        ("50", "50%", True),
        ("0.5", "50%", True),
        ("50%", "0.5", True),
        ("5%", "50%", False),
        ("1" + "0" * 400, "1" + "0" * 400, True),
        ("123456789012345678901234567890123456788", "123456789012345678901234567890123456789", False),
        ("1e-5", "0.00001", True),
        ("1e9999", "1" + "0" * 9999, True),
    ],
)
def test_numbers_are_compared_exactly_and_units_where_both_have_one(
    given: str, right: str, equal: bool
) -> None:
    one, other = one_number(given), one_number(right)
    assert one is not None
    assert other is not None
    assert are_equal(one, other) is equal


@pytest.mark.parametrize(
    "text",
    [
        "1" + ",11" * 5000, "1,11" * 4000, "1 000 " * 2600 + "0", "1 " + "000 " * 4000 + "00000",
        "9" * 16_000, "(" * 16_000, "(1" * 8000, "(" * 8000 + "1" + ")" * 8000, "<a" * 8000, "\\text{" * 2600,
        "\\frac{1" * 2600, "1/" * 8000, "-" * 16_000, "1 or " * 3000, "1, " * 5000, " " * 16_000,
    ],
)  # fmt: skip
def test_a_long_text_is_read_in_time_proportional_to_its_length(text: str) -> None:
    """The regular expression of before took 7.7 s for 48 KB of ``1,11,11...``, and a ninth for a third."""
    began = time.process_time()
    quantities(text)
    assert time.process_time() - began < 0.5  # 0.07 s on a machine with nothing else to do
