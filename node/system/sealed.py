"""JSON objects in files that say whether they are as they were written.

    {..., "digest": "<BLAKE3 of all other bytes of the file, hex>"}

A bit that flips on a disk or in memory leaves most numbers a number. So each file that a process writes and
reads back later is sealed, and so are those that hold the digests of others.
"""

import json
from typing import Any, Final

import blake3

_MEMBER: Final = b'"digest": "'
_END: Final = b'"}\n'
_DIGITS: Final = 64


def sealed(text: str) -> bytes:
    """Return a JSON object with its digest as the last member.

    Raises ValueError: the text is not that of an object.
    """
    members, end = text.rstrip()[:-1].rstrip(), text.rstrip()[-1:]
    if end != "}" or not members.startswith("{"):
        raise ValueError(f"only a JSON object can be sealed, not {text[:40]!r}")
    before = members.encode() + (b"" if members == "{" else b", ") + _MEMBER
    return before + _digest(before) + _END


def unsealed(data: bytes, *, must_be_sealed: bool = False) -> Any:
    """Return the JSON value in a file, without its digest.

    Args:
        must_be_sealed: refuse one without a digest, as older software wrote it.
    Raises:
        ValueError: it is not JSON, or not as it was written.
    """
    # json's own reader: pydantic's takes no NaN and no infinity.
    value = json.loads(data)
    if not isinstance(value, dict) or "digest" not in value:
        if must_be_sealed:
            raise ValueError("it has no digest")
        return value
    before, digest, end = (
        data[: -_DIGITS - len(_END)],
        data[-_DIGITS - len(_END) : -len(_END)],
        data[-len(_END) :],
    )
    if not before.endswith(_MEMBER) or end != _END or digest != _digest(before):
        raise ValueError("it does not have its digest: it was cut short or changed")
    return {key: member for key, member in value.items() if key != "digest"}


def _digest(before: bytes) -> bytes:
    return blake3.blake3(before + _END).hexdigest().encode()
