"""Messages between the sampler and its graders: JSON with its length in front.

{"index": 7}                    -> {"text": "3+4="} | {"error": ...} | {"odd": ...} | {"too_long": characters}
{"index": 7, "texts": ["7"]}    -> {"rewards": [1.0]} | {"error": ...}
"""

import json
import struct
from typing import Any, Final

LENGTH: Final = struct.Struct("<I")

REQUEST_BYTES: Final = 64 << 20
"""A group of 4 Mi tokens as JSON text; larger is a fault of ours, not work."""

PROMPT_CHARACTERS: Final = 4 << 20
"""A prompt of a million tokens, the most that a group may have, is about that long."""

REPLY_BYTES: Final = 6 * PROMPT_CHARACTERS
"""A prompt with every character escaped. More is a grader that writes where it should not."""


def framed(message: dict[str, Any]) -> bytes:
    """Return ``message`` as it goes down the pipe."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body
