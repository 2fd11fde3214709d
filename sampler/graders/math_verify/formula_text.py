r"""Texts that may be the answer of a completion, and which part of a text is its formula.

Right answers and completions are treated alike: each is freed of what stands around it (``$``, ``\boxed``,
``\text``, bold, a full stop).
"""

import re
from collections.abc import Iterator
from typing import Final

from node.questions.marked_text import boxes, marked_answers
from node.questions.normal_text import normal_characters
from node.questions.number_text import quantities
from node.questions.units import unit_of

_FUNCTIONS: Final = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "exp", "sqrt", "pi",
     "inf", "max", "min", "mod", "gcd", "lcm"}
)  # fmt: skip
_SHORT_WORDS: Final = frozenset(
    {"no", "on", "up", "or", "so", "if", "it", "is", "in", "at", "us", "as", "am", "an", "by", "me", "we",
     "he", "go", "do", "of", "to", "be", "my", "oh", "ok", "hi", "yo"}
)  # fmt: skip
"""Two letters that are a word and no product of variables."""

_SEGMENT: Final = re.compile(
    r"\$\$(?P<display>[^$]{1,4000})\$\$"
    r"|(?<!\\)\$(?P<inline>(?!\s)(?:[^$\n\\]|\\.){1,4000}(?<!\s))\$(?!\d)"
    r"|\\\((?P<round>(?:(?!\\[()])(?:[^\\]|\\\\|\\)){1,4000}+)\\\)"
    r"|\\\[(?P<square>(?:(?!\\[\[\]])(?:[^\\]|\\\\|\\)){1,4000}+)\\\]",
    re.DOTALL,
)
"""Mathematics in a text. As in Markdown, a dollar after a space or before a digit closes none."""


_BETWEEN: Final = re.compile(r"[\s,;.$]*(?:\b(?:and|or)\b)?[\s,;$]*")
"""Text between the formulas of a list."""

_WRAPPERS: Final = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$(?P<in>[^$]*)\$\$",
        r"\$(?P<in>[^$]+)\$",
        r"\\\((?P<in>.*)\\\)",
        r"\\\[(?P<in>.*)\\\]",
        r"\*\*(?P<in>[^*]*)\*\*",
        r"`(?P<in>[^`]*)`",
        r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|mbox)\s?\{(?P<in>[^{}]*)\}",
    )
]

_REWRITTEN: Final = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\[dt]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;:! ]|~", " "),
        (r"\\leq(?![A-Za-z])|≤", r"\\le "),
        (r"\\geq(?![A-Za-z])|≥", r"\\ge "),
        (r"∞", r"\\infty "),
        (r"π", r"\\pi "),
        ("\N{UNION}", r"\\cup "),
        (r"√\s?(\w+)", r"\\sqrt{\1}"),
        (r"\{,\}", ","),
        (r"\s+", " "),
    )
]

_CHOICE: Final = re.compile(
    r"(?:(?:option|choice|answer)\s+)?\(?\s?(?P<letter>[A-Ja-j])\s?(?P<end>[.:)]{1,2}(?:\s+(?P<rest>[^=+*/^<>]{1,2000}))?)?",
    re.IGNORECASE,
)
_CHOSEN: Final = re.compile(
    r"[*(]{0,3}([B-J]|A(?= because\b| since\b| as\b))[*)]{0,3}(?= (?!or\b|and\b)[a-z])"
)
"""The letter that an answer of several words begins with; an A is an article where no reason follows."""
_LETTER: Final = re.compile(r"(?<![\w'\\$^_{-])[A-J](?![\w'}^_])")
_WORDS: Final = re.compile(r"[^\W\d_][^\d\\^=+*/<>$%|{}\[\]_]*")
_WORD: Final = re.compile(r"[(\"']*(?P<word>[^\W\d_][^\W\d_'\u2019-]+)[.,;:!?)\"']*")
_OPERATOR: Final = re.compile(r"[\d\\^=+*/<>|]")


def bare(text: str) -> str:
    """Return ``text`` without what stands around it."""
    text = normal_characters(text).strip()
    for _ in range(8):
        shorter = text.rstrip(" .,;:!").strip() if not text.endswith(r"\!") else text
        match = next((found for each in _WRAPPERS if (found := each.fullmatch(shorter))), None)
        if match is None:
            text = shorter
            break
        text = match["in"].strip()
    for pattern, by in _REWRITTEN:
        text = pattern.sub(by, text)
    return text.strip()


def answers_in(part: str, *, right: str) -> Iterator[str]:
    """Yield the texts of a completion that may be its answer; the first that is a formula decides.

    Args:
        part: what is graded of the completion.
        right: a list in it lets several boxes be one answer, a choice's letter lets that be looked for.
    """
    found_mark = False
    is_choice = bool(choice_of(bare(right)))
    for marked in marked_answers(part):
        found_mark = True
        if marked.is_box:
            yield _joined_boxes(part) if _is_list(right) else marked.text
            return
        formula = formula_in(marked.text)
        if is_choice and (chosen := _CHOSEN.match(marked.text)):
            yield chosen[1]
            return
        yield marked.text
        if formula is not None:
            yield formula
        if not marked.is_sentence or _is_formula(marked.text):
            return
    if found_mark:
        return
    if is_choice and len(letters := set(_LETTER.findall(_without_articles(part)))) == 1:
        yield letters.pop()
    formula = formula_in(part)
    if formula is not None:
        yield formula


def formula_in(text: str) -> str | None:
    """Return the last formula of ``text``, several of a list joined by commas; None: it has none."""
    if segments := list(_SEGMENT.finditer(text)):
        return _joined_segments(text, segments)
    for line in reversed(text.splitlines()):
        if (formula := _last_run(line)) is not None:
            return formula
    return None


def choice_of(text: str) -> str:
    """Return the letter of a choice: of ``B``, ``(B)``, ``B. Paris``; empty: it is none."""
    if (match := _CHOICE.fullmatch(text)) is None or _LETTER.search(match["rest"] or ""):
        return ""
    letter = match["letter"]
    return letter.upper() if letter.isupper() or match["end"] or "(" in text else ""


def is_words(text: str) -> bool:
    """Whether ``text`` is words, and no product of variables."""
    if not _WORDS.fullmatch(text):
        return False
    words = [word for word in re.split(r"[^\w]+", text) if word]
    return any((len(word) > 2 or word.lower() in _SHORT_WORDS) and word not in _FUNCTIONS for word in words)


def _is_formula(text: str) -> bool:
    text = bare(text)
    return bool(_OPERATOR.search(text)) or bool(choice_of(text)) or len(text) == 1


def brackets_of(text: str) -> str | None:
    """Return the kind of brackets around a list: of ``[1, 2)``, ``[)``; None: it has none."""
    text = text.replace("\\{", "{").replace("\\}", "}")
    if len(text) < 3 or text[0] not in "([{" or text[-1] not in ")]}":
        return None
    depth, commas = 0, 0
    for at, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        commas += sign == "," and depth == 1
        if depth == 0 and at < len(text) - 1:
            return None
    return text[0] + text[-1] if commas else None


def _is_list(text: str) -> bool:
    text = bare(text)
    return "," in text and brackets_of(text) in (None, "{}") and not _is_number(text)


def _is_number(text: str) -> bool:
    found = quantities(text)
    return len(found) == 1 and found[0].value is not None


def _joined_boxes(text: str) -> str:
    found = boxes(text)
    at = len(found) - 1
    while at > 0 and _BETWEEN.fullmatch(text[found[at - 1][1] : found[at][0]]):
        at -= 1
    return ", ".join(inside for _, _, inside in found[at:])


def _joined_segments(text: str, segments: list[re.Match[str]]) -> str:
    at = len(segments) - 1
    while at > 0 and _BETWEEN.fullmatch(text[segments[at - 1].end() : segments[at].start()]):
        at -= 1
    joined = ", ".join(next(filter(None, each.groups())).strip() for each in segments[at:])
    after = re.match(r"\s*(\\?%|[A-Za-z]+)", text[segments[-1].end() :])
    return f"{joined} {after[1]}" if after and unit_of(after[1].lstrip("\\")) else joined


def _last_run(line: str) -> str | None:
    """Return the last tokens of a line that are no words: ``So it is 2x + 3.`` has 2x + 3."""
    runs: list[list[str]] = []
    is_open, depth, joins = False, 0, False
    tokens = line.replace("**", "").split()
    for at, token in enumerate(tokens):
        word = _WORD.fullmatch(token)
        is_article = token in ("a", "A", "I") and re.fullmatch(
            r"(?!and$|or$)[a-z].*", " ".join(tokens[at + 1 : at + 2])
        )
        if is_article or (word and word["word"] not in _FUNCTIONS and not (depth and is_open)):
            name = word["word"] if word else token
            if is_open and unit_of(name) and not joins:
                runs[-1].append(token)
            joins = is_open and name in ("and", "or")
            is_open = is_open and joins
            continue
        if is_open:
            if joins:
                runs[-1].append(",")
            runs[-1].append(token)
        else:
            runs.append([token])
        depth = max(0, depth + sum(map(token.count, "([{")) - sum(map(token.count, ")]}")))
        joins, is_open = False, bool(depth) or token[-1] not in ".;:!?"
    for number, run in enumerate(reversed(runs)):
        text = " ".join(run)
        if _OPERATOR.search(text) or (number == 0 and tokens[-1] == run[-1]):
            return text
    return None


def _without_articles(text: str) -> str:
    return re.sub(r"\bA(?= (?!and\b|or\b)[a-z])|\bI\b", "", text)
