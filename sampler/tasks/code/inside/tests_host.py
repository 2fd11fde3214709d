"""Runs a row's tests in a sandbox of their own, against functions of a program in another one.

    tests --request--> program      standard output
    tests <--reply---  program      standard input
    tests --verdict--> grader       standard error: BEGUN, then {"tests": n} or {"broken": why} in a line,
                                    then PASSED or FAILED for each test; last GONE, if the program is

A name that neither the tests nor Python define is the program's. Its functions are called from here, with
plain data both ways: what is expected, and how it is compared, the program never sees.
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sampler.tasks.code.inside.shared import LINE_BYTES, begin, packed, unpacked

CHECK: Final = "check"
"""The function of HumanEval's tests, whose argument is the function to be tested."""


PASSED: Final = b"1"
FAILED: Final = b"0"
GONE: Final = b"x"


class ProgramGoneError(Exception):
    """The program has ended, or does not keep to the protocol."""


class Program:
    """The other sandbox."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests = os.fdopen(requests, "wb", buffering=0)
        self._replies = os.fdopen(replies, "rb")
        self.is_gone = False

    def ask(self, *request: Any) -> Any:
        """Return the program's answer, or raise what it raised, or ProgramGoneError, then for ever."""
        if self.is_gone:
            raise ProgramGoneError
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            line = self._replies.readline(LINE_BYTES)
            if not line.endswith(b"\n"):
                raise ValueError("no whole reply")
            reply = json.loads(line)
            if isinstance(reply, list):
                (data,) = reply
                return unpacked(data, lambda number: Remote(self, number))
            name, text = reply["raised"]
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            self.is_gone = True
            raise ProgramGoneError from error
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(str(text))
        raise RuntimeError(f"{name}: {text}")


class Remote:
    """An object of the program's that is no plain data. It equals itself only, whatever the program says."""

    def __init__(self, program: Program, number: int) -> None:
        self._program, self._number = program, number

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("attribute", self._number, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given = [packed(each, _reference) for each in arguments]
        return self._program.ask(
            "call", self._number, given, {name: packed(each, _reference) for name, each in named.items()}
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program.ask("items", self._number))

    def __len__(self) -> int:
        return int(self._program.ask("length", self._number))

    def __bool__(self) -> bool:
        return bool(self._program.ask("truth", self._number))

    def __str__(self) -> str:
        return str(self._program.ask("text", self._number))


def _reference(value: Any) -> int:
    if not isinstance(value, Remote):
        raise TypeError(f"{type(value).__name__} cannot be sent to the program")
    return value._number


def main(cpu_s: str, memory_bytes: str) -> None:
    """Run the tests in /tests.json."""
    given = json.loads(Path("/tests.json").read_bytes())
    begin(int(cpu_s), int(memory_bytes))
    requests, replies, verdict = os.dup(1), os.dup(0), os.dup(2)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    program = Program(requests, replies)
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
    _ask_for_names(space, statements, program)
    for statement in statements:
        passed = _passes(statement, space)
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
        with contextlib.suppress(Exception):
            space[name] = program.ask("global", name)


def _free_names(statements: list[ast.stmt]) -> set[str]:
    used, bound = set(), set(dir(builtins))
    for node in (node for statement in statements for node in ast.walk(statement)):
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
