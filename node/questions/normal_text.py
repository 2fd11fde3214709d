"""Texts in which each sign is written in one way: in ASCII where it has the sign, and without markup."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

_CHARACTERS: Final[dict[int, str]] = {
    **dict.fromkeys(map(ord, "\N{MINUS SIGN}\N{SMALL HYPHEN-MINUS}\N{NON-BREAKING HYPHEN}\N{HYPHEN}"), "-"),
    **dict.fromkeys(
        map(ord, "\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}\N{DOT OPERATOR}\N{BULLET OPERATOR}"), "*"
    ),
    **dict.fromkeys(map(ord, "\N{DIVISION SIGN}\N{DIVISION SLASH}\N{FRACTION SLASH}"), "/"),
    **dict.fromkeys(map(ord, "→⇒≈≃≅"), " = "),
    **dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u200a\u202f\u3000"), " "),
    ord("\N{RIGHT SINGLE QUOTATION MARK}"): "'",
    ord("\N{ARABIC DECIMAL SEPARATOR}"): ".",
    ord("\N{ARABIC THOUSANDS SEPARATOR}"): ",",
}

_REWRITTEN: Final[Sequence[tuple[re.Pattern[str], str]]] = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"</?[A-Za-z][^<>\n]{0,80}>", " "),
        (r"\\(?:left|right|big|Big)(?![A-Za-z])|\\!", ""),
        (r"\{,\}", ","),
        (r"\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\pm(?![A-Za-z])", "±"),
        (r"\\(?:to|implies|approx|simeq|sim|[rR]ightarrow)(?![A-Za-z])|[-=]>", " = "),
        (r"\^\s?\{?\\circ\}?|\\degree", "°"),
        (r"\\([$%#&])", r"\1"),
        (r"\\[dt]?frac\s?\{\s?(\d{1,400})\s?\}\s?\{\s?(\d{1,400})\s?\}", r" \1/\2 "),
        (r"\\[dt]?frac\s?(\d)\s?(\d)", r" \1/\2 "),
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s?\{([^{}]*)\}", r" \1 "),
        (r"\^\{(-?\d{1,9})\}", r"^\1"),
        (r"_\{(\w{1,9})\}", r"_\1"),
        (r"(?<=[\w)])\*\*(?=[\w(])", "^"),
        (r"\*\*|__|`", ""),
        (r"(?<=\d) ?[xX] ?(?=\d)", "*"),
    )
]
"""LaTeX, Markdown and tags, and what stands for them; the order counts."""


def normal_characters(text: str) -> str:
    """Return ``text`` in NFC, with ASCII's digits, minus, and forms of full width."""
    text = unicodedata.normalize("NFC", text)
    return text if text.isascii() else "".join(map(_plain_character, text))


def without_markup(text: str) -> str:
    """Return ``text`` with normal characters, and plain signs for those of LaTeX, Markdown and HTML."""
    text = normal_characters(text)
    for pattern, by in _REWRITTEN:
        text = pattern.sub(by, text)
    return text


def _plain_character(character: str) -> str:
    code = ord(character)
    if code < 128:
        return character
    if code in _CHARACTERS:
        return _CHARACTERS[code]
    if 0xFF01 <= code <= 0xFF5E:  # full width
        return chr(code - 0xFEE0)
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    if unicodedata.category(character) == "No":
        plain = unicodedata.normalize("NFKC", character)
        if "\N{FRACTION SLASH}" in plain:
            return " " + plain.replace("\N{FRACTION SLASH}", "/")
        return f"^{plain}" if unicodedata.decomposition(character).startswith("<super>") else character
    return character
