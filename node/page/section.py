"""The content of a page, as values: sections of paragraphs, lists, tables, curves and quoted texts.

Texts are plain: ``node/page/html.py`` escapes every one of them, as many come from strangers' machines.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Points: TypeAlias = Sequence[tuple[float, float]]
"""(policy version, value), in the order of the versions."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a curve, or the dots of one kind."""

    name: str
    points: Points
    is_dotted: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """Lines and dots over policy versions; its caption tells the newest value and the range of the first."""

    title: str
    """With the unit of its values."""
    series: tuple[Series, ...]
    marks: Sequence[tuple[float, str]] = ()
    """Versions at which something happened, and what."""


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sentences."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; a cell is shown as ``str`` shows it."""

    names: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


class Tone(enum.StrEnum):
    """The kind of a quoted text, which decides its colour."""

    PROMPT = "prompt"
    ABOVE = "above"
    """A completion that did better than the mean of its group."""
    LEVEL = "level"
    BELOW = "below"


@dataclass(frozen=True, slots=True)
class Quotation:
    """A text as a model or a data set has it, line by line."""

    about: str
    """A line above it."""
    text: str
    tone: Tone


Block: TypeAlias = str | Items | Grid | Curve | Quotation
"""A plain string is a paragraph."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]
    is_folded: bool = False
    """Whether a click shows its content."""
