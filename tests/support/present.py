"""Values that may be missing, where a test needs one."""

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return a value that has to be there."""
    assert value is not None
    return value
