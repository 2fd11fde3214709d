"""A program in another sandbox, as the tests see it: functions that return plain data, and its one failure.

No test takes an object of the program for data, or an exception of the program for one of Python's own.
"""

from __future__ import annotations

import builtins
import json
import os
import sys

from sampler.graders.code.inside.shared import LINE_BYTES, packed, unpacked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Any, Final

MOST_ITEMS: Final = 1024
"""Most items of an iterator in one answer. The first answer has one, and each has twice the one before."""

_OF_DATA: Final = frozenset(
    name for kind in (str, bytes, float, set) for name in dir(kind) if name.startswith("is")
) | {"startswith", "endswith", "replace", "intersection", "difference", "symmetric_difference"}
"""Methods of builtin types that an object passes for right by returning True, nothing, or what it gets."""


class ProgramError(Exception):
    """The program raised an exception, whatever it was, or answered what is no answer.

    One kind, so that nothing between the program and the tests takes it for its own: ``map``, ``all`` and
    ``for`` end at StopIteration, ``for`` over ``__getitem__`` at IndexError, ``Mapping.get`` at KeyError.
    Handlers that are written in the tests see it as the builtin kind that the program raised.
    """

    def __init__(self, text: str, kind: type[BaseException] = Exception) -> None:
        super().__init__(text)
        self.kind = kind

    def as_builtin(self) -> BaseException:
        """Return what the program raised, or would have if its kind were Python's own."""
        return self.kind.__new__(self.kind, *self.args)  # __init__ of some kinds wants more than a text


class ProgramGoneError(BaseException):
    """The program has ended, or its line is no JSON. Nothing in the tests expects that."""


class Program:
    """The other sandbox.

    Args:
        requests, replies: Descriptors of the pipes to it.
        is_finite: Whether infinity and NaN are no answers: every comparison with NaN is false, among them
            "is off by more than".
    """

    def __init__(self, requests: int, replies: int, *, is_finite: bool) -> None:
        self._requests = os.fdopen(requests, "wb", buffering=0)
        self._replies = os.fdopen(replies, "rb")
        self._read_float = _finite if is_finite else float.fromhex
        self.is_gone = False

    def ask(self, what: str, *request: Any) -> Any:
        """Return the program's answer, or raise ProgramError, or ProgramGoneError, then for ever."""
        if self.is_gone:
            raise ProgramGoneError
        try:
            self._requests.write(json.dumps([what, *request]).encode() + b"\n")
            line = self._replies.readline(LINE_BYTES)
            if not line.endswith(b"\n"):
                raise ValueError("no whole reply")
            reply = json.loads(line)
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            self.is_gone = True
            raise ProgramGoneError from error
        try:
            if isinstance(reply, list):
                (data,) = reply
                return unpacked(data, lambda tag, number: _REMOTE[tag](self, number), self._read_float)
            name, text = map(str, reply["raised"])
        except Exception as error:
            raise ProgramError("an answer that cannot be used") from error
        kind = getattr(builtins, name, None)
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            kind = Exception
        # A group cannot be made of a text.
        raise ProgramError(text, Exception if issubclass(kind, BaseExceptionGroup) else kind)


def _finite(text: str) -> float:
    number = float.fromhex(text)
    if number - number != 0:
        raise ValueError(f"{number} is no answer")
    return number


class Remote:
    """An object of the program's: its attributes and calls are answered with data, or other objects.

    It is not data itself, and a test that takes it for data fails: asked whether it is true, how long it is,
    what it holds or what it equals, an object could say each time what the question wants to hear.
    """

    __slots__ = ("_remote_number", "_remote_program")

    def __init__(self, program: Program, number: int) -> None:
        self._remote_program, self._remote_number = program, number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OF_DATA:
            raise AttributeError(f"{name} is asked of data, and this is an object of the program")
        try:
            return self._remote_program.ask("attribute", self._remote_number, name)
        except ProgramError as error:
            if error.kind is AttributeError:
                raise error.as_builtin() from None  # for hasattr
            raise

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given = [packed(each, _reference) for each in arguments]
        return self._remote_program.ask(
            "call",
            self._remote_number,
            given,
            {name: packed(each, _reference) for name, each in named.items()},
        )

    def __str__(self) -> str:
        return str(self._remote_program.ask("text", self._remote_number))

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false")

    def __eq__(self, other: object) -> bool:
        raise TypeError("an object of the program equals nothing")


def _drawn(program: Program, number: int) -> Iterator[Any]:
    """Yield what a generator, view or range of the program holds, once; it may be endless."""
    most = 1
    while items := program.ask("items", number, most):
        yield from items
        most = min(2 * most, MOST_ITEMS)


_REMOTE: Final[dict[str, Callable[[Program, Any], Any]]] = {"object": Remote, "iterator": _drawn}


def _reference(value: Any) -> dict[str, int]:
    if not isinstance(value, Remote):
        raise TypeError(f"{type(value).__name__} cannot be sent to the program")
    return {"object": value._remote_number}


def caught(kinds: Any) -> Any:
    """Return what ``except kinds`` of the tests catches now: failures of those kinds too."""
    error = sys.exc_info()[1]
    is_of_kind = isinstance(error, ProgramError) and issubclass(error.kind, kinds)
    return ProgramError if is_of_kind else kinds


def seen(error: BaseException) -> BaseException:
    """Return what a handler of the tests gets to see of an exception."""
    return error.as_builtin() if isinstance(error, ProgramError) else error


class Context:
    """A context manager of the tests', such as ``contextlib.suppress``, which sees what their handlers do."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> Any:
        return self._manager.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        shown = None if error is None else seen(error)
        return self._manager.__exit__(kind if shown is error else type(shown), shown, trace)
