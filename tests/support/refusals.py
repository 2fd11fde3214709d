"""Expect a refusal by its reason, and an error by the names and values in it; never by its sentence.

A name is what the sender needs to find the cause: an id, a key, a path, a number, a command. Words of a
sentence are not, so that messages can be improved without touching a test.
"""

from contextlib import AbstractContextManager
from typing import TypeVar

import pytest

from node.errors import ConfigError, Reason, RefusedError, StartupError

E = TypeVar("E", bound=Exception)


def refused(reason: Reason, *names: str) -> "AbstractContextManager[pytest.ExceptionInfo[RefusedError]]":
    """Expect the body to be refused for this reason, with these names in the detail."""
    return pytest.raises(RefusedError, check=lambda error: error.reason is reason and _has(str(error), names))


def misconfigured(*names: str, key: str) -> "AbstractContextManager[pytest.ExceptionInfo[ConfigError]]":
    """Expect the body to end with a fault of this key, with these names in the rule or the fix."""
    return pytest.raises(ConfigError, check=lambda error: error.key == key and _has(str(error), names))


def cannot_start(*names: str) -> "AbstractContextManager[pytest.ExceptionInfo[StartupError]]":
    """Expect the body to end because it cannot start, with these names in what it says."""
    return pytest.raises(StartupError, check=lambda error: _has(str(error), names))


def naming(error: type[E], *names: str) -> "AbstractContextManager[pytest.ExceptionInfo[E]]":
    """Expect the body to end with this error, with these names in what it says."""
    return pytest.raises(error, check=lambda caught: _has(str(caught), names))


def _has(text: str, names: tuple[str, ...]) -> bool:
    return all(name in text for name in names)
