"""Messages between the sampler and its grader: JSON with its length in front."""

import json
import struct
from typing import Any, Final

LENGTH: Final = struct.Struct("<I")

REQUEST_BYTES: Final = 64 << 20
"""A group of 4 Mi tokens as JSON text; larger is a fault of ours, not work."""

REPLY_BYTES: Final = 1 << 20
"""1024 rewards are 25 kB. More is a grader that writes where it should not."""


def framed(message: dict[str, Any]) -> bytes:
    """Give ``message`` as it goes down the pipe."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body
