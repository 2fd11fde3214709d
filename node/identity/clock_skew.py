"""Moments and remedies that messages about certificates and clocks share."""

import datetime
from typing import Final

ENROL_AGAIN: Final = (
    "Make a token where the coordinator runs (`heterorl-node token DIR --role {role} --address HOST:PORT "
    "--out FILE`), set node.token_file to it, move the old identity directory away, and start again."
)


def moment(unix_s: float) -> str:
    """Return Unix seconds as a date and time, UTC."""
    try:
        return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:g} s"
