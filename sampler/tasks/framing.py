"""Messages between the sampler and its graders: JSON with its length in front.

{"index": 7}                    -> {"text": "3+4="} | {"error": ...} | {"odd": ...} | {"too_long": characters}
{"index": 7, "texts": ["7"]}    -> {"rewards": [1.0]} | {"error": ...}
"""

import json
import struct
from typing import Any, Final

LENGTH: Final = struct.Struct("<I")

REQUEST_BYTES: Final = 64 << 20
"""Enough for a group of 4 Mi tokens as JSON text."""

PROMPT_CHARACTERS: Final = 4 << 20
"""About the length of a prompt of a million tokens, the most that a group may have."""

REPLY_BYTES: Final = 6 * PROMPT_CHARACTERS
"""A prompt with every character escaped. More means that a grader writes where it should not."""


def framed(message: dict[str, Any]) -> bytes:
    """Return ``message`` with its length in front."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body
