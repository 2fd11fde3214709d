"""Text from strangers made harmless: what a terminal or browser would obey becomes visible instead."""

import unicodedata
from html import escape
from typing import Final

_KEPT: Final = frozenset("\n\t")
_SPACE: Final = "Zs"


def visible(text: str) -> str:
    r"""Return ``text`` with every character that does not show replaced by its escape, such as ``\x1b``.

    Control characters, marks that turn the direction of writing, zero-width characters, surrogates and what
    is not assigned. Line feeds, tabs and spaces of any width stay.
    """
    return "".join(
        character if _is_harmless(character) else character.encode("unicode_escape").decode()
        for character in text
    )


def as_html(of: object) -> str:
    """Return a text for a page's body or attribute: every character visible, none of them markup."""
    return escape(visible(str(of)))


def quoted(text: str) -> str:
    """Return visible text with every line marked as quoted: none can pass for a heading."""
    return "\n".join(f"| {line}" for line in visible(text).split("\n"))


def _is_harmless(character: str) -> bool:
    return character.isprintable() or character in _KEPT or unicodedata.category(character) == _SPACE
