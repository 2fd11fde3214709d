"""Runs a row's tests in a sandbox of their own, against functions of a program in another one.

    tests_host CPU_SECONDS MEMORY_BYTES     with /tests, made by ``assertions``

    tests --request--> program      standard output
    tests <--reply---  program      standard input
    tests --verdict--> grader       standard error: BEGUN, then PASSED or FAILED for each test; last GONE, if
                                    the program is; or else BROKEN and why, if the tests are

What is expected, and how it is compared, the program never sees.
"""

from __future__ import annotations

import importlib
import marshal
import os
import sys

from sampler.graders.code.inside.program import (
    Context,
    Program,
    ProgramError,
    ProgramGoneError,
    caught,
    seen,
)
from sampler.graders.code.inside.shared import begin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, Final

PASSED: Final = b"1"
FAILED: Final = b"0"
GONE: Final = b"x"
BROKEN: Final = b"!"

CAUGHT: Final = "<caught>"
SEEN: Final = "<seen>"
CONTEXT: Final = "<context>"
"""Names of these functions in compiled tests; no source can have them."""


def main() -> None:
    """Run the tests in /tests."""
    _, cpu_s, memory_bytes = sys.argv
    with open("/tests", "rb") as file:
        given = marshal.load(file)
    begin(int(cpu_s), int(memory_bytes))
    requests, replies, verdict = os.dup(1), os.dup(0), os.dup(2)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    space: dict[str, Any] = {
        "__name__": "tests",
        CAUGHT: caught,
        SEEN: seen,
        CONTEXT: Context,
        "eval": _calculated,
    }
    for source, code in given["imports"]:
        if not _passes(code, space):
            os.write(verdict, BROKEN + f"cannot do: {source}".encode())
            return
    for name in given["modules"]:
        space[name] = importlib.import_module(name)
    program = Program(requests, replies, is_finite=given["is_finite"])
    # Names that the program lacks; then what a statement that failed half-way should have bound or changed: a
    # loop that was to collect faults.
    spoilt: set[str] = set()
    for name in given["names"]:
        try:
            space[name] = program.ask("global", name)
        except (ProgramError, ProgramGoneError):
            spoilt.add(name)
    for code, is_test, used, changed in given["statements"]:
        passed = spoilt.isdisjoint(used) and _passes(code, space) and not program.is_gone
        spoilt = spoilt - changed if passed else spoilt | changed
        if is_test:
            os.write(verdict, PASSED if passed else FAILED)
    if program.is_gone:
        os.write(verdict, GONE)


def _passes(code: CodeType, space: dict[str, Any]) -> bool:
    try:
        exec(code, space)
    except BaseException:
        # Whatever it is, the test has failed; the next one may not.
        return False
    return True


def _calculated(text: str) -> Any:
    """Return the value of an expression of literals and operators, in place of ``eval``.

    The text may be the program's answer, and would decide here what passes.
    """
    import ast  # for the few rows that need it

    tree = ast.parse(text, mode="eval")
    allowed = (
        ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Tuple, ast.List,
        ast.Set, ast.Dict, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Load,
    )  # fmt: skip
    for node in ast.walk(tree):
        if not isinstance(node, allowed):
            raise ValueError(f"{type(node).__name__} is more than literals and operators")
    return eval(compile(tree, "answer", "eval"), {"__builtins__": {}})
