r"""Where a text marks its answer: ``\boxed{42}``, ``#### 42``, ``Answer: 42``, ``the answer is 42``.

The last mark counts, whatever follows it. Reading takes time in proportion to the text's length.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MOST_MARKS: Final = 4
"""The last marks that are looked at: an earlier one counts only where those after it mark nothing."""

_BOX: Final = re.compile(
    r"\\(?:boxed|fbox)\s{0,2}(?:(?P<brace>\{)|(?P<bare>[\w.+-]{1,40}))|\\[\\{}]|(?P<close>\})|\{"
)

_MARK: Final = re.compile(
    r"####|\banswers?(?:\*\*|__|['\")\]]|\s\d)?\s{0,3}(?P<colon>[:=\N{FULLWIDTH COLON}])"
    r"|\banswers?[^.:=\n]{0,60}?\b(?:is|are)\b(?!\s+not\b)(?P<soft>\s{0,3}:?)",
    re.IGNORECASE,
)

_SENTENCE_END: Final = re.compile(r"[.!?](?=\s|$)")


@dataclass(frozen=True, slots=True)
class MarkedAnswer:
    """An answer that a mark points out."""

    start: int
    text: str
    is_box: bool = False
    is_sentence: bool = False
    """Whether it is the rest of a sentence, such as "the answer is clear", which may not be an answer."""


def marked_answers(text: str) -> Iterator[MarkedAnswer]:
    """Yield the marked answers, the last one first, at most ``MOST_MARKS``."""
    marked = [MarkedAnswer(start, inside, is_box=True) for start, _, inside in boxes(text)]
    marked += [
        MarkedAnswer(match.start(), inside, is_sentence=match["soft"] is not None)
        for match in list(_MARK.finditer(text))[-MOST_MARKS:]
        if (inside := _line_after(text, match))
    ]
    marked.sort(key=lambda each: each.start)
    last_box = max((at for at, each in enumerate(marked) if each.is_box), default=-1)
    for each in marked[: -MOST_MARKS - 1 : -1]:
        # A line that has a box is no other answer than the box.
        if each.is_box or "\\boxed" not in each.text or last_box < 0:
            yield each


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Return start, end and content of each box of LaTeX that is closed, without the boxes around others."""
    found: list[tuple[int, int, str]] = []
    open_at: list[tuple[int, int] | None] = []
    for match in _BOX.finditer(text):
        if match["bare"] is not None:
            found.append((match.start(), match.end(), match["bare"]))
        elif match["brace"] is not None:
            open_at.append((match.start(), match.end()))
        elif match[0] == "{":
            open_at.append(None)
        elif match["close"] is not None and open_at and (box := open_at.pop()) is not None:
            start, inside = box
            if not found or found[-1][0] < start:
                found.append((start, match.end(), text[inside : match.start()].strip()))
    return found


def _line_after(text: str, match: re.Match[str]) -> str:
    """Return the rest of the mark's line, or the next line with text, up to the end of a sentence."""
    at = match.end()
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[at : min(end, at + 10_000)].strip().lstrip("*_: ").rstrip("*_ ")
        if line:
            stop = None if match[0] == "####" else _SENTENCE_END.search(line, 1)
            return (line[: stop.start()] if stop else line).strip()
        at = end + 1
    return ""
