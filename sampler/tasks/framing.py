"""Messages between the sampler and its graders: a JSON object a line.

{"path": "p.m:Task", "options": {...}}  -> {"prompts": 100, ...} | {"unusable": ...}
{"index": 7, "row": "{...}"}            -> {"text": "3+4="} | {"messages": [...]} | {"error": ...}
                                           | {"odd": ...} | {"too_long": characters}
{"index": 7, "row": "{...}", "conversation": [{"role": ..., "content": ...}]}
                                        -> likewise | {"is_over": true}
{"index": 7, "row": "{...}", "completions": [["7", 2, "end"]]}
                                        -> {"rewards": [1.0], "metrics": {"a": [0.5]}} | {"error": ...}
                                           | {"unavailable": ...}, each also with {"outages": {reason: times}}

Every request but the first has a "number", which its answer repeats: what a task writes where answers are
read is no answer.
"""

import json
from typing import Any, Final

PROMPT_CHARACTERS: Final = 4 << 20
"""About the length of a prompt of a million tokens, the most that a group may have."""

TURNS: Final = 16
"""Turns of a completion at most, unless a task that replies says otherwise."""

MOST_TURNS: Final = 1024
"""What it may say: each turn is a request of its own, to the engine and to the task."""

TRACEBACK_CHARACTERS: Final = 8000
"""The end of a traceback that is passed on; its last frames say most."""

REPLY_BYTES: Final = 6 * PROMPT_CHARACTERS + 1024
"""A prompt with every character escaped. More means that a grader writes where it should not."""


def framed(message: dict[str, Any]) -> bytes:
    """Return ``message`` as a line: JSON escapes the line breaks within it."""
    return json.dumps(message).encode() + b"\n"
