"""The program in a completion."""

import re
from typing import Final

_BLOCK: Final = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def program_of(text: str, prefix: str) -> str:
    """Return the last fenced block, or all of a text that has none; ``prefix`` is what it continues."""
    if blocks := _BLOCK.findall(text):
        return f"{prefix}\n{blocks[-1]}" if prefix else str(blocks[-1])
    return prefix + text
