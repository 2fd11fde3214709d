"""Which part of a completion is graded, as ``PromptOptions.answer_from`` says; or why it has no answer."""

import re
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from node.questions.marked_text import boxes
from node.tasks.task_options import PromptOptions

_OPEN, _CLOSE = "<answer>", "</answer>"

THINKING_ENDS: Final = (
    "</think>",
    "</thinking>",
    "</thought>",
    "</reasoning>",
    "[/THINK]",
    "\N{FISHEYE}/think\N{WHITE RIGHT-POINTING SMALL TRIANGLE}",
    "<|channel|>final<|message|>",
)
"""Texts that models write between thinking and answer. The beginning may stand in the chat template alone."""

_BEGINS: Final = (
    "<think>",
    "<thinking>",
    "<thought>",
    "<reasoning>",
    "[THINK]",
    "<|channel|>analysis<|message|>",
)
"""Texts that begin thinking, where a completion begins with them. Later ones may be of the question."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """The part of a completion that is graded."""

    text: str | None
    """Not stripped; None: there is no answer."""
    why_none: str = ""

    @property
    def stripped(self) -> str | None:
        """The text without white space around it."""
        return None if self.text is None else self.text.strip()


def answer_part(text: str, finish: str, options: PromptOptions) -> AnswerPart:
    """Return what of a completion is graded; ``finish``: as of ``CompletionText``."""
    if options.answer_pattern is not None:
        return _matched(text, options.answer_pattern)
    answer = _after_thinking(text)
    if answer is None and options.answer_from == "after_thinking":
        return AnswerPart(None, f"it has no end of thinking, such as {THINKING_ENDS[0]}")
    if answer is None and text.lstrip().startswith(_BEGINS):
        return AnswerPart(None, "its thinking does not end")
    answer = text if answer is None else answer
    match options.answer_from:
        case "last_line":
            lines = (line for line in reversed(answer.splitlines()) if line.strip())
            line = next(lines, None)
            return AnswerPart(line, "" if line is not None else "it has no line with text")
        case "tags":
            return _tagged(answer, finish)
        case "boxed":
            found = boxes(answer)
            return (
                AnswerPart(found[-1][2])
                if found
                else AnswerPart(None, r"it has no \boxed{...} that is closed")
            )
        case _:
            return AnswerPart(answer)


def _after_thinking(text: str) -> str | None:
    """Return what follows the last end of thinking; None: there is none."""
    ends = [at + len(tag) for tag in THINKING_ENDS if (at := text.rfind(tag)) >= 0]
    return text[max(ends) :] if ends else None


def _tagged(text: str, finish: str) -> AnswerPart:
    end = text.rfind(_CLOSE)
    # The closing tag may have been the stop string.
    end = len(text) if end < 0 and finish == "stop" else end
    start = text.rfind(_OPEN, 0, max(0, end))
    if start >= 0:
        return AnswerPart(text[start + len(_OPEN) : end])
    is_cut = end < 0 and _OPEN in text
    return AnswerPart(None, f"it has no {_CLOSE}" if is_cut else f"it has no {_OPEN} before {_CLOSE}")


def _matched(text: str, pattern: str) -> AnswerPart:
    last = next(iter(deque(_compiled(pattern).finditer(text), maxlen=1)), None)
    if last is None or last[1] is None:
        return AnswerPart(None, "answer_pattern matches nothing in it")
    return AnswerPart(last[1])


@lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
