"""Which faults can be planted in a module: one at a time, as another text of one expression or statement.

Comparisons and their boundaries, boolean operators, arithmetic, numbers, results, swapped arguments and
branches, statements left out. What people read stays as it is: messages, logs, docstrings, annotations. So do
numbers that have a name, outside of functions: a test of a setting would only repeat it. So does what checks
our own work, assertions and ``zip(strict=True)``: a test can only show that it never fails.
"""

import ast
import copy
import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_BOUNDARIES: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_TWINS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SYMMETRIC: Final = frozenset({"array_equal", "hypot", "maximum", "minimum"})
"""Functions whose first two arguments may be swapped: it changes nothing."""
_READ_BY_PEOPLE: Final = frozenset({"logger", "log", "warnings"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in one file."""

    path: str
    """Relative to the repository."""
    function: str
    """Qualified name of the innermost function or class; "" outside of all."""
    line: int
    before: str
    """What the source says, of the expression or statement that changes."""
    after: str
    source: str
    """Of the whole file, with the fault."""

    @property
    def name(self) -> tuple[str, str, str, str]:
        """Return what names the fault wherever its lines move."""
        return (self.path, self.function, " ".join(self.before.split()), " ".join(self.after.split()))

    def diff(self, original: str) -> str:
        """Return the lines that change."""
        lines = [*difflib.unified_diff(original.splitlines(), self.source.splitlines(), n=0, lineterm="")]
        return "\n".join(line for line in lines[2:] if not line.startswith("@@"))


def faults(path: str, source: str) -> list[Fault]:
    """Return every fault that can be planted in a file, in the order of its lines."""
    spliced = _Spliced(source)
    found: dict[str, Fault] = {}
    for function, node, others in _Walk().module(ast.parse(source)):
        before = spliced.text(node)
        for other in others:
            after = _unparsed(other, like=node)
            changed = spliced.replaced(node, after)
            fault = Fault(path, function, node.lineno, before, after, changed)
            if changed != source:
                found.setdefault(changed, fault)
    return sorted(found.values(), key=lambda fault: fault.line)


def _unparsed(other: ast.AST, *, like: ast.AST) -> str:
    text = ast.unparse(other)
    # Brackets keep the precedence that the expression around it relies on.
    return f"({text})" if isinstance(other, ast.expr) and isinstance(like, _OPERATIONS) else text


_OPERATIONS: Final = (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp, ast.IfExp)


class _Spliced:
    """A source in which one node's text is exchanged."""

    def __init__(self, source: str) -> None:
        self._lines = [line.encode() for line in source.splitlines(keepends=True)]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._bytes = b"".join(self._lines)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._bytes[start:end].decode()

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> str:
        start, end = self._span(node)
        return (self._bytes[:start] + text.encode() + self._bytes[end:]).decode()


_Found = tuple[str, "ast.expr | ast.stmt", list[ast.AST]]


class _Walk:
    """Goes through a module and says which other nodes could stand in place of which."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def module(self, tree: ast.Module) -> Iterator[_Found]:
        for statement in tree.body:
            if not isinstance(statement, ast.Assign | ast.AnnAssign):
                yield from self._statement(statement)

    def _body(self, body: Sequence[ast.stmt]) -> Iterator[_Found]:
        for statement in body:
            yield from self._statement(statement)

    def _statement(self, statement: ast.stmt) -> Iterator[_Found]:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield from self._definition(statement)
                return
            case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Pass():
                return
            case ast.Expr(value=ast.Constant()):
                return  # a docstring, or the body of a protocol
            case ast.Raise():
                yield self._here(statement, [ast.Pass()])
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case _:
                yield from self._ordinary(statement)

    def _ordinary(self, statement: ast.stmt) -> Iterator[_Found]:
        if isinstance(statement, ast.Expr) and _is_for_people(statement.value):
            return
        if self._names and self._is_removable(statement):
            yield self._here(statement, [ast.Pass()])
        if isinstance(statement, ast.Return) and _has_result(statement):
            yield self._here(statement, [ast.Return(ast.Constant(None))])
        if isinstance(statement, ast.If | ast.While) and not isinstance(statement.test, ast.Compare):
            yield self._here(statement.test, [_negated(statement.test)])
        for name, value in ast.iter_fields(statement):
            if name == "annotation":
                continue
            for each in value if isinstance(value, list) else [value]:
                yield from self._part(each)

    def _part(self, part: object) -> Iterator[_Found]:
        match part:
            case ast.stmt():
                yield from self._statement(part)
            case ast.expr():
                yield from self._expression(part)
            case ast.keyword(arg="strict"):
                return
            case ast.AST():  # handlers, items of with, cases, keywords, comprehensions
                for _, value in ast.iter_fields(part):
                    for each in value if isinstance(value, list) else [value]:
                        yield from self._part(each)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[_Found]:
        if any(ast.unparse(base).startswith(("Protocol", "enum.", "StrEnum")) for base in _bases(node)):
            return
        self._names.append(node.name)
        if not isinstance(node, ast.ClassDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                yield from self._part(default)
            self._names.append("<locals>")
        yield from self._body(node.body)
        if not isinstance(node, ast.ClassDef):
            self._names.pop()
        self._names.pop()

    @staticmethod
    def _is_removable(statement: ast.stmt) -> bool:
        match statement:
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
                return True
            case ast.Continue() | ast.Break():
                return True
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                return True
        return False

    def _expression(self, node: ast.expr) -> Iterator[_Found]:
        if isinstance(node, ast.JoinedStr) or _is_for_people(node):
            return
        others = list(_others(node, is_in_function="<locals>" in self._names))
        if others:
            yield self._here(node, others)
        for child in ast.iter_child_nodes(node):
            yield from self._part(child)

    def _here(self, node: ast.expr | ast.stmt, others: Iterable[ast.AST]) -> _Found:
        names = [*self._names]
        if names and names[-1] == "<locals>":
            names.pop()
        return ".".join(names), node, list(others)


def _others(node: ast.expr, *, is_in_function: bool) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=[*operators]):
            for place, operator in enumerate(operators):
                for other in _BOUNDARIES[type(operator)]:
                    changed = copy.deepcopy(node)
                    changed.ops[place] = other()
                    yield changed
        case ast.BoolOp():
            changed_op = copy.deepcopy(node)
            changed_op.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield changed_op
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BinOp() if type(node.op) in _ARITHMETIC and not _is_text(node):
            changed_bin = copy.deepcopy(node)
            changed_bin.op = _ARITHMETIC[type(node.op)]()
            yield changed_bin
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value) if is_in_function or value in (0, 1):
            yield ast.Constant(value + 1)
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)
        case ast.Call(func=ast.Name(id=name)) if name in _TWINS:
            changed_call = copy.deepcopy(node)
            changed_call.func = ast.Name(_TWINS[name])
            yield changed_call
        case ast.Call(func=ast.Attribute(attr=name)) if name in _SYMMETRIC:
            return
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred | ast.Constant):
            if not isinstance(second, ast.Starred) and ast.unparse(first) != ast.unparse(second):
                changed_call = copy.deepcopy(node)
                changed_call.args = [second, first, *rest]
                yield changed_call


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _has_result(statement: ast.Return) -> bool:
    return not (
        statement.value is None
        or (isinstance(statement.value, ast.Constant) and statement.value.value is None)
    )


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def _is_for_people(node: ast.expr) -> bool:
    """Whether an expression only says something: a call of a logger."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return name in _READ_BY_PEOPLE
    return False


def _bases(node: ast.AST) -> Sequence[ast.expr]:
    return node.bases if isinstance(node, ast.ClassDef) else ()
