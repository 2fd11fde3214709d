"""Which numbers stand in a text, and what they are worth.

A text is cut at words, line ends, equals signs and the punctuation of sentences. Each piece with a digit is
one ``Quantity``: a plain number, a fraction or a power of ten has a value. Pieces such as 12:30, (2, 5),
2024-05-01, 10-20, 2x and "3 or 4" have none, so that nothing in them is taken for a number. Values are exact.
Reading takes time in proportion to the text's length.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final

from node.questions.normal_text import without_markup
from node.questions.quantity import Quantity, Value, fraction_of, scaled
from node.questions.units import SCALES, unit_of

_NUMBER: Final = (
    r"(?:(?<![\d.,])(?<!\d[ '_])\d{1,3}"
    r"(?:(?:(?= \d{3}) \d{3})++|(?:(?='\d{3})'\d{3})++|(?:(?=_\d{3})_\d{3})++)(?!\d)(?:\.\d++)?"
    r"|(?:\d++|(?<![\w)])\.\d++)(?:(?=[.,]\d)[.,]\d++)*+)(?:[eE][+-]?\d++(?!\w))?"
)
"""A number as people write it. Whether its groups of digits are those of a number is looked at afterwards.
Repetitions are possessive, and thousands begin only where no number ends: no text is read twice. Each looks
ahead, since Python before 3.11.5 keeps what a possessive repetition read of its last, failed turn."""

_TOKEN: Final = re.compile(
    rf"(?P<number>{_NUMBER})|(?P<word>[^\W\d_]\w*)|(?P<command>\\[A-Za-z]+)|(?P<sign>\\?[^\s\w]|_)|(?P<line>\n)"
)

_GROUPED: Final = re.compile(r"\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?")
"""Thousands, or lakhs as in India."""

_OPENING: Final = frozenset({"(", "[", "{", "\\{", "\\(", "\\["})
_CLOSING: Final = frozenset({")", "]", "}", "\\}", "\\)", "\\]"})
_MATHEMATICS: Final = _OPENING | _CLOSING | frozenset("/:^*+-±<>≤≥≠√|$€£¥%°_\N{EN DASH}")
"""Signs that make one thing of the numbers beside them."""

_LIST_WORDS: Final = frozenset({"or", "and", "to", "through", "out", "of"})
_TIMES: Final = frozenset({"am", "pm", "AM", "PM", "dozen", "half", "quarter", "quarters", "third", "thirds"})
"""Words that make something else of the number before them."""
_ORDINALS: Final = frozenset({"st", "nd", "rd", "th"})
_MONTH_NAMES: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
_MONTHS: Final = frozenset(_MONTH_NAMES) | frozenset(name[:3] for name in _MONTH_NAMES)
_NEUTRAL: Final = frozenset({"\\in", "\\equiv", "\\displaystyle", "\\therefore", "\\boxed", "\\fbox"})
"""Commands of LaTeX that leave the number after them what it is."""

_PLAIN: Final = re.compile(
    rf"(?P<sign>[+-]?)(?P<currency>[$€£¥]?)(?P<minus>-?)(?P<number>{_NUMBER})[€£¥$%°]?"
)
_FRACTION: Final = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<whole>\d+) )?(?P<above>{_NUMBER})/(?P<below>{_NUMBER})%?"
)
_POWER: Final = re.compile(rf"(?P<sign>[+-]?)(?:(?P<number>{_NUMBER})\*)?10\^(?P<exponent>[+-]?\d{{1,4}})")


def quantities(text: str) -> list[Quantity]:
    """Return what ``text`` has of numbers, in its order."""
    reader = _Reader()
    reader.read(list(_tokens(without_markup(text))))
    return reader.found


def one_number(text: str) -> Quantity | None:
    """Return the number that ``text`` has, perhaps among words; None if it has not exactly one."""
    found = quantities(text)
    return found[0] if len(found) == 1 and found[0].is_plain else None


def last_number(text: str) -> Quantity | None:
    """Return the last number of ``text``, asides left out; None: its last quantity is not a number."""
    found = quantities(text)
    found = [each for each in found if not each.is_aside] or found
    return found[-1] if found and found[-1].value is not None else None


def first_number(text: str) -> Quantity | None:
    """Return the first number of ``text``, or what it equals: of ``3 + 4 = 7 (in 2 steps)``, 7."""
    found = quantities(text)
    found = [each for each in found if not each.is_aside] or found
    at = 0
    while at + 1 < len(found) and found[at + 1].is_result:
        at += 1
    return found[at] if found and found[at].value is not None else None


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    is_apart: bool
    """Whether white space stands before it."""


_END: Final = _Token("line", "\n", True)


def _tokens(text: str) -> Iterator[_Token]:
    end = -1
    for match in _TOKEN.finditer(text):
        yield _Token(match.lastgroup or "", match[0], match.start() != end)
        end = match.end()
    yield _END


class _Reader:
    """Cuts tokens into pieces and reads each piece that has a digit."""

    def __init__(self) -> None:
        self.found: list[Quantity] = []
        self._pairs: dict[int, bool] = {}
        self._piece: list[str] = []
        self._has_digit = False
        self._spoilt = False
        """Whether a word makes the piece something else than a number."""
        self._unit = ""
        self._exponent = 0
        self._depth = 0
        """Brackets with words that are open."""
        self._brackets = 0
        """Brackets without words that are open."""
        self._follows = ""
        """The sign or word that the piece was cut off by."""
        self._list_may_grow = False
        """Whether nothing but ``_follows`` stands between the last quantity and the piece."""

    def read(self, tokens: list[_Token]) -> None:
        """Append what ``tokens`` have."""
        self._pairs = _pairs(tokens)
        at = 0
        while at < len(tokens):
            token, after = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else _END
            at += 1
            if token.kind == "number":
                if after.kind == "word" and not after.is_apart and after.text in _ORDINALS:
                    at += 1
                    self._cut("")
                    continue
                self._add(token)
                self._has_digit = True
                at = self._read_unit(tokens, at)
            elif token.kind == "command" and token.text not in _NEUTRAL:
                self._add(token)
            elif token.kind == "word":
                self._read_word(token, tokens[at - 2] if at > 1 else _END, after)
            elif token.kind == "sign":
                self._read_sign(token, after, has_words=self._pairs.get(at - 1))
            else:
                self._cut("")
                self._depth = self._depth if token.kind == "command" else 0

    def _add(self, token: _Token) -> None:
        self._piece.append(f" {token.text}" if token.is_apart and self._piece else token.text)

    def _read_unit(self, tokens: list[_Token], at: int) -> int:
        """Read what belongs to the number before ``at``; return where to go on."""
        words = 0
        if tokens[at].text == "$" and not tokens[at].is_apart and self._piece[0].startswith("$"):
            self._add(tokens[at])  # $10$ cm
            at += 1
        while at < len(tokens) and tokens[at].kind == "word" and words < 3:
            token = tokens[at]
            word = token.text
            exponent = SCALES.get(word) or (SCALES.get(word.lower()) if len(word) > 2 else None)
            if word in _TIMES or word in _MONTHS:
                self._spoilt = True
            elif exponent and (len(word) > 1 or not token.is_apart):
                self._exponent += exponent
            elif unit := unit_of(word):
                return self._read_whole_unit(tokens, at, unit)
            elif not token.is_apart and len(word) > 3:
                break  # 42apples
            elif not token.is_apart:
                self._spoilt = True  # 2x, 3D
            else:
                break
            at += 1
            words += 1
        return at

    def _read_whole_unit(self, tokens: list[_Token], at: int, unit: str) -> int:
        at += 1
        texts = [token.text for token in tokens[at : at + 2]]
        if texts[:1] == ["^"] and tokens[at + 1].kind == "number":
            unit, at = f"{unit}^{texts[1]}", at + 2
        elif texts[:1] == ["/"] and tokens[at + 1].kind == "word":
            unit, at = f"{unit}/{unit_of(texts[1]) or texts[1]}", at + 2
        self._unit = unit
        return at

    def _read_word(self, token: _Token, before: _Token, after: _Token) -> None:
        is_variable = len(token.text) == 1 and token.text not in ("a", "A", "I")
        if is_variable:
            self._add(token)
            return
        if not token.is_apart and before.text == "-" and self._has_digit:  # 3-fold
            self._spoilt = True
        self._cut(token.text)
        if after.text == "-" and not after.is_apart:
            self._follows = "-"  # a name, such as step-3

    def _read_sign(self, token: _Token, after: _Token, *, has_words: bool | None) -> None:
        sign = token.text
        if sign in _OPENING or sign in _CLOSING:
            if has_words is False:
                self._add(token)
                self._brackets += 1 if sign in _OPENING else -1
                return
            self._cut("")
            if has_words:
                self._depth += 1 if sign in _OPENING else -1
        elif sign == ":" and after.is_apart and not token.is_apart:
            self._cut("")
        elif sign in _MATHEMATICS or (sign in (",", ";") and self._brackets):
            self._add(token)
        else:
            self._cut(sign)

    def _cut(self, by: str) -> None:
        """End the piece, at a word or a sign."""
        piece, follows = "".join(self._piece), self._follows
        if self._has_digit and not (follows == "-" and piece.startswith("-")):
            self._read_piece(piece, follows, by)
            self._list_may_grow = True
        elif piece:
            self._list_may_grow = False
        self._list_may_grow = self._list_may_grow and (by in _LIST_WORDS or by == ",")
        self._piece, self._has_digit, self._spoilt, self._unit, self._exponent = [], False, False, "", 0
        self._follows = by

    def _read_piece(self, piece: str, follows: str, by: str) -> None:
        is_aside = self._depth > 0
        value, unit = (None, "") if self._spoilt or follows in _MONTHS else _value(piece, follows)
        if value is not None and self._exponent:
            value = None if isinstance(value, Fraction) else scaled(value, self._exponent)
        is_plain = isinstance(value, Decimal)
        found = Quantity(value, is_plain, self._unit or unit, is_aside, follows == "=")
        if follows == "not":
            return
        is_list = follows in _LIST_WORDS or (follows == "," and not (by.isalpha() and by not in _LIST_WORDS))
        if self._list_may_grow and self.found and is_list:
            self.found[-1] = Quantity(None, is_aside=is_aside)
        else:
            self.found.append(found)


def _pairs(tokens: list[_Token]) -> dict[int, bool]:
    """Return where brackets open and close on one line, and whether words stand in them."""
    pairs: dict[int, bool] = {}
    open_at: list[tuple[int, int]] = []
    words = 0
    for at, token in enumerate(tokens):
        if token.kind == "word" and len(token.text) > 1 and not unit_of(token.text):
            words += 1
        elif token.kind == "line":
            open_at.clear()
        elif token.text in _OPENING:
            open_at.append((at, words))
        elif token.text in _CLOSING and open_at:
            start, before = open_at.pop()
            pairs[start] = pairs[at] = words > before
    return pairs


def _value(piece: str, follows: str) -> tuple[Value | None, str]:
    """Return what a piece is worth, None if it is not a number; and its unit."""
    if piece.startswith(("- ", "* ", "> ", "+ ")):
        # After an equals sign a minus, else a dash or a bullet.
        piece = f"-{piece[2:]}" if follows == "=" and piece[0] == "-" else piece[2:]
    is_formula = piece.count("$") > 1 or piece.endswith("$")
    piece = piece.strip(" :*_")
    if is_formula:
        piece = piece.replace("$", "").strip()
    piece = re.sub(r"\\(?=[][(){}])", "", piece)
    start, end = 0, len(piece)
    while start < end and piece[start] in "([{ " and piece[end - 1] in ")]} ":
        start, end = start + 1, end - 1
    piece = piece[start:end].strip()
    more_open = sum(map(piece.count, "([{")) - sum(map(piece.count, ")]}"))
    if more_open < 0:  # of a bracket that was opened before an equals sign
        piece = piece.rstrip(")]} ")
    if " " in piece:
        piece = re.sub(r" ?([*/^%€£¥$°]) ?", r"\1", piece)
    if match := _PLAIN.fullmatch(piece):
        signs = match["sign"] + match["minus"]
        unit = unit_of(match["currency"]) or (unit_of(piece[-1]) if not piece[-1].isdigit() else "")
        return (None if len(signs) > 1 else _decimal(match["number"], signs)), unit
    if match := _POWER.fullmatch(piece):
        mantissa = _decimal(match["number"] or "1", match["sign"])
        return (None if mantissa is None else scaled(mantissa, int(match["exponent"]))), ""
    if match := _FRACTION.fullmatch(piece):
        return _divided(match), "%" if piece.endswith("%") else ""
    return None, ""


def _decimal(text: str, sign: str) -> Decimal | None:
    """Return what digits are worth; None if their groups are those of no number, such as 1,2,3 or 1.2.3."""
    digits = text.translate({ord(each): None for each in " '_"})
    mantissa = digits.lower().partition("e")[0]
    if mantissa.count(".") > 1 or ("," in mantissa and not _GROUPED.fullmatch(mantissa)):
        return None
    exponent = digits[len(mantissa) :]
    if len(exponent.lstrip("eE+-").lstrip("0")) > 4:
        return None  # worth nothing that anybody means
    value = Decimal(digits.replace(",", ""))
    return -value if sign == "-" and value else value


def _divided(match: re.Match[str]) -> Fraction | None:
    parts = [_decimal(match[name] or "0", "") for name in ("whole", "above", "below")]
    whole, above, below = (None if part is None else fraction_of(part) for part in parts)
    if whole is None or above is None or not below:
        return None
    value = whole + above / below
    return -value if match["sign"] == "-" else value
