"""Runs a row's tests in a sandbox of their own, against functions of a program in another one.

    tests --request--> program      standard output
    tests <--reply---  program      standard input
    tests --verdict--> grader       standard error: BEGUN, then {"tests": n} or {"broken": why} in a line,
                                    then PASSED or FAILED for each test; last GONE, if the program is

A name that neither the tests nor Python define is the program's. Its functions are called from here, with
plain data both ways: what is expected, and how it is compared, the program never sees. No test takes an
object of the program for data, or an exception of the program for the end of an iteration.
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from sampler.tasks.code.inside.shared import LINE_BYTES, begin, packed, unpacked

CHECK: Final = "check"
"""The function of HumanEval's tests, whose argument is the function to be tested."""

MOST_ITEMS: Final = 1024
"""Most items of an iterator in one answer. The first answer has one, and each has twice the one before."""

_OF_DATA: Final = frozenset(
    name for kind in (str, bytes, float, set) for name in dir(kind) if name.startswith("is")
) | {"startswith", "endswith", "intersection"}
"""Methods of builtin types that an object passes for right by returning True, or what it is given."""

_NEVER_RAISED: Final = (StopIteration, StopAsyncIteration, BaseExceptionGroup)
"""Kinds that end an iteration, or cannot be made of a text."""

PASSED: Final = b"1"
FAILED: Final = b"0"
GONE: Final = b"x"


class ProgramError(Exception):
    """The program raised an exception, of whatever kind.

    Where the tests catch exceptions it is also one of the builtin kind that the program raised, except for
    those by which iteration ends: no ``map``, ``all`` or ``for`` takes a failure for the end of its items.
    """


class ProgramGoneError(BaseException):
    """The program has ended, or its line is no JSON. Nothing in the tests expects that."""


class Program:
    """The other sandbox; ``catches``: whether the tests catch exceptions."""

    def __init__(self, requests: int, replies: int, *, catches: bool) -> None:
        self._requests = os.fdopen(requests, "wb", buffering=0)
        self._replies = os.fdopen(replies, "rb")
        self._catches = catches
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
        except (OSError, ValueError, RecursionError) as error:
            self.is_gone = True
            raise ProgramGoneError from error
        try:
            if isinstance(reply, list):
                (data,) = reply
                return unpacked(data, lambda tag, number: _REMOTE[tag](self, number))
            name, text = map(str, reply["raised"])
        except Exception as error:
            raise ProgramError("an answer that cannot be used") from error
        # hasattr catches the one kind without saying so.
        is_missing = (what, name) == ("attribute", "AttributeError")
        raise _error(name, text, has_kind=self._catches or is_missing)


def _error(name: str, text: str, *, has_kind: bool) -> ProgramError:
    kind = getattr(builtins, name, None) if has_kind else None
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, _NEVER_RAISED):
        return ProgramError(f"{name}: {text}")
    both: type[ProgramError] = type(name, (ProgramError, kind), {})
    return both.__new__(both, text)  # __init__ of some kinds wants more than a text


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
        return self._remote_program.ask("attribute", self._remote_number, name)

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


def main(cpu_s: str, memory_bytes: str) -> None:
    """Run the tests in /tests.json."""
    given = json.loads(Path("/tests.json").read_bytes())
    begin(int(cpu_s), int(memory_bytes))
    requests, replies, verdict = os.dup(1), os.dup(0), os.dup(2)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        statements = _statements(given)
        tests = sum(map(_is_test, statements))
        if not tests:
            raise ValueError("there is no assert in them; if they are in a function check, name entry_point")
    except (SyntaxError, ValueError, RecursionError) as error:
        os.write(verdict, json.dumps({"broken": f"{type(error).__name__}: {error}"[:500]}).encode() + b"\n")
        return
    space: dict[str, Any] = {"__name__": "tests"}
    broken = _imported(space, statements)
    os.write(verdict, json.dumps({"broken": broken} if broken else {"tests": tests}).encode() + b"\n")
    if broken:
        return
    catching = (ast.ExceptHandler, ast.With)
    catches = any(isinstance(node, catching) for node in _nodes(statements))
    program = Program(requests, replies, catches=catches)
    _ask_for_names(space, statements, program)
    for statement in statements:
        passed = _passes(statement, space) and not program.is_gone
        if _is_test(statement):
            os.write(verdict, PASSED if passed else FAILED)
    if program.is_gone:
        os.write(verdict, GONE)


def _statements(given: dict[str, Any]) -> list[ast.stmt]:
    """Return the statements of setup and tests; those of a function ``check`` for itself."""
    found: list[ast.stmt] = []
    for text in [given["setup"], *given["tests"]]:
        for statement in ast.parse(text).body:
            is_check = isinstance(statement, ast.FunctionDef) and statement.name == CHECK and given["entry"]
            if is_check and isinstance(statement, ast.FunctionDef) and len(statement.args.args) == 1:
                found.append(ast.parse(f"{statement.args.args[0].arg} = {given['entry']}").body[0])
                found += statement.body
            else:
                found.append(statement)
    return found


def _is_test(statement: ast.stmt) -> bool:
    is_definition = isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    return not is_definition and any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _imported(space: dict[str, Any], statements: list[ast.stmt]) -> str | None:
    """Import what the tests do, and modules that they use without; return what cannot be imported."""
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom) and not _passes(statement, space):
            return f"cannot do: {ast.unparse(statement)}"
    for name in _free_names(statements) - space.keys() & sys.stdlib_module_names:
        # Never the program's: it would judge itself.
        space[name] = importlib.import_module(name)
    return None


def _ask_for_names(space: dict[str, Any], statements: list[ast.stmt], program: Program) -> None:
    for name in sorted(_free_names(statements) - space.keys()):
        # Where there is none, the tests that use it fail.
        with contextlib.suppress(ProgramError, ProgramGoneError):
            space[name] = program.ask("global", name)


def _nodes(statements: list[ast.stmt]) -> Iterator[ast.AST]:
    return (node for statement in statements for node in ast.walk(statement))


def _free_names(statements: list[ast.stmt]) -> set[str]:
    used, bound = set(), set(dir(builtins))
    for node in _nodes(statements):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                bound.add(name)
    return used - bound


def _passes(statement: ast.stmt, space: dict[str, Any]) -> bool:
    try:
        exec(compile(ast.Module([statement], []), "tests", "exec"), space)
    except BaseException:
        # Whatever it is, the test has failed; the next one may not.
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
