"""Asserts in a row, compiled for the sandbox that runs them.

Decides what in the source is a test: a statement with an assert that depends on the program. An
``assert True`` is none, or whoever writes nothing would have a share of the reward.

    names bound in the tests, or by the prefix beside its last definition    the tests'
    builtins, modules of the standard library                                Python's
    the entry point, and all other names                                     the program's

Refuses tests by which the program's answer would run as code where it is judged.
"""

import ast
import builtins
import marshal
import re
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from sampler.graders.code.inside.tests_host import CAUGHT, CONTEXT, SEEN

CHECK: Final = "check"
"""The function of HumanEval's tests, whose argument is the function to be tested."""

_RUN_CODE: Final = {"exec", "compile", "__import__", "builtins", "code", "codeop", "ctypes", "doctest"} | {
    "marshal", "pickle", "pickletools", "runpy", "shelve", "subprocess", "timeit"
}  # fmt: skip
"""Builtins and modules that make code of data. ``eval`` is not among them: the sandbox has another one."""

_NOT_FINITE: Final = re.compile(r"(?<![a-z])(is)?(nan|inf|infinity|finite)(?![a-z])", re.IGNORECASE)
"""Words of tests that expect infinity or NaN."""

_PYTHONS: Final = sys.stdlib_module_names | frozenset(dir(builtins))


@dataclass(frozen=True, slots=True)
class Assertions:
    """Tests of one row."""

    count: int
    compiled: bytes
    """For ``tests_host``; code of this very Python."""


def assertions(sources: Sequence[str], *, setup: str = "", prefix: str = "", entry: str = "") -> Assertions:
    """Compile the tests of a row.

    Args:
        sources: With asserts, or a function ``check`` that has them.
        setup: Source that comes before.
        prefix: Source that completions continue. A program may define again what it has, and tests use.
        entry: Name of the function that is tested, if the row says it.
    Raises:
        ValueError: they are no Python, test nothing, or do what they must not.
    """
    try:
        statements = _helpers(prefix, entry) + _statements([setup, *sources], entry)
        imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
        statements = [node for node in statements if node not in imports]
        used, bound = _names(statements)
        imported = _names(imports)[1]
        entries = {entry} - bound - {""}
        pythons = (_PYTHONS | imported) - bound - entries
        names = used - bound - pythons
        _check(imports, used & pythons)
        reaches = [_reach(node, pythons) for node in statements]
        tests = _tests(statements, reaches, names)
        if not any(tests):
            raise ValueError(
                "there is no assert in them that depends on the program; if they are in a function check, "
                "name entry_point"
            )
        compiled = marshal.dumps(
            {
                "imports": [(ast.unparse(node), _compiled(node)) for node in imports],
                "modules": sorted(used & pythons - imported - set(dir(builtins))),
                "names": sorted(names),
                "is_finite": not any(map(_NOT_FINITE.search, [setup, *sources])),
                "statements": [
                    (_compiled(node), is_test, used, changed - names)
                    for node, is_test, (used, changed) in zip(statements, tests, reaches, strict=True)
                ],
            }
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests cannot be used: {type(error).__name__}: {error}"[:500]) from error
    return Assertions(sum(tests), compiled)


def _helpers(prefix: str, entry: str) -> list[ast.stmt]:
    """Return what a prefix imports and defines, but for what completions are to define."""
    try:
        statements = ast.parse(prefix).body
    except SyntaxError:
        # It ends with a line that begins the body, or that begins nothing.
        try:
            statements = ast.parse(f"{prefix.rstrip()}\n    pass\n").body
        except SyntaxError:
            return []
    definitions = [node for node in statements if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    asked = {entry} if entry else {node.name for node in definitions[-1:]}
    return [
        node
        for node in statements
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign)
        or (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in asked)
    ]


def _statements(sources: Sequence[str], entry: str) -> list[ast.stmt]:
    """Return the statements of all sources; those of a function ``check`` one by one."""
    found: list[ast.stmt] = []
    for node in (node for source in sources for node in ast.parse(source).body):
        is_check = isinstance(node, ast.FunctionDef) and node.name == CHECK and entry
        if is_check and isinstance(node, ast.FunctionDef) and len(node.args.args) == 1:
            found.append(ast.parse(f"{node.args.args[0].arg} = {entry}").body[0])
            found += node.body
        else:
            found.append(node)
    return found


def _check(imports: Iterable[ast.Import | ast.ImportFrom], used: Set[str]) -> None:
    for node in imports:
        froms = [node.module or "."] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        for module in (name.partition(".")[0] for name in froms):
            if module not in sys.stdlib_module_names:
                raise ValueError(f"cannot do: {ast.unparse(node)}, which is not of the standard library")
            used = used | {module}
    if refused := sorted(used & _RUN_CODE):
        raise ValueError(f"they use {refused[0]}, by which an answer of the program could run as code")


def _tests(
    statements: Sequence[ast.stmt], reaches: Sequence[tuple[set[str], set[str]]], names: set[str]
) -> list[bool]:
    """Return for each statement whether it is an assert that depends on the program, which has ``names``."""
    depending = set(names)
    while True:
        more = {name for used, changed in reaches if used & depending for name in changed}
        if more <= depending:
            break
        depending |= more
    return [
        _has_assert(node) and bool(used & depending)
        for node, (used, _) in zip(statements, reaches, strict=True)
    ]


def _reach(statement: ast.stmt, pythons: frozenset[str]) -> tuple[set[str], set[str]]:
    """Return the names that a statement uses as they are, and those that it may bind or change."""
    used, bound = _names([statement])
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return used - bound - pythons, {statement.name}
    changed = set(bound)
    for node in () if isinstance(statement, ast.Assert) else ast.walk(statement):
        match node:
            case ast.Attribute(value=ast.Name(id=name)) | ast.Subscript(value=ast.Name(id=name)):
                changed.add(name)
            case ast.Call(args=arguments, keywords=keywords):
                given = (inner for each in [*arguments, *keywords] for inner in ast.walk(each))
                changed |= {inner.id for inner in given if isinstance(inner, ast.Name)}
    return used - _bound_first(statement) - pythons, changed - pythons


def _bound_first(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds, from its text's beginning on, before it uses them."""
    bound: dict[str, tuple[int, int]] = {}
    for node in ast.walk(statement):
        since = (0, 0)  # arguments, and variables of comprehensions, which stand behind their use
        if isinstance(node, ast.Assign | ast.For):
            source = node.value if isinstance(node, ast.Assign) else node.iter
            since = (source.end_lineno or 0, source.end_col_offset or 0)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        elif isinstance(node, ast.arg | ast.comprehension):
            targets = [node.target] if isinstance(node, ast.comprehension) else []
            bound |= {node.arg: since} if isinstance(node, ast.arg) else {}
        else:
            continue
        for name in _names(targets)[1]:
            bound[name] = min(since, bound.get(name, since))
    before = {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and (node.lineno, node.col_offset) < bound.get(node.id, (0, 0))
    }
    return bound.keys() - before


def _has_assert(statement: ast.stmt) -> bool:
    is_definition = isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    return not is_definition and any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _names(statements: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the names that statements use, and those that they bind."""
    used, bound = set(), set()
    for node in _nodes(statements):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.AugAssign(target=ast.Name(id=name)):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case (
                ast.FunctionDef(name=str(name))
                | ast.AsyncFunctionDef(name=str(name))
                | ast.ClassDef(name=str(name))
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                bound.add(name)
            case ast.alias(name=name, asname=alias):
                bound.add(alias or name.partition(".")[0])
    return used, bound


def _nodes(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return (node for statement in statements for node in ast.walk(statement))


def _compiled(statement: ast.stmt) -> Any:
    module = ast.Module([_Handlers().visit(statement)], [])
    return compile(ast.fix_missing_locations(module), "tests", "exec")


class _Handlers(ast.NodeTransformer):
    """Lets handlers and context managers see failures of the program as ``program`` describes."""

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        if node.type is not None:
            node.type = _called(CAUGHT, node.type)
        if node.name is not None:
            shown = _called(SEEN, ast.Name(node.name, ast.Load()))
            node.body.insert(0, ast.Assign([ast.Name(node.name, ast.Store())], shown))
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        for item in node.items:
            item.context_expr = _called(CONTEXT, item.context_expr)
        return node

    def visit_TryStar(self, node: ast.TryStar) -> ast.AST:
        return node  # A group's handlers want groups.


def _called(function: str, argument: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(function, ast.Load()), [argument], [])
