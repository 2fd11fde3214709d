"""Names in the product: a class name stands for one thing; a name in a docstring is in the code."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from support.product_modules import PRODUCT, modules

NAME: Final = re.compile(r"``([A-Za-z_]+(?:\.[A-Za-z_]+)*)``")
FOREIGN: Final = frozenset(
    {
        "apply_chat_template",  # transformers
        "bench.cheats",
        "block_size",  # vLLM
        "lb",  # a pound
        "leg_counting",  # reasoning_gym
        "save_to_disk",  # datasets
        "user_version",  # SQLite
        "wordle",  # verifiers
    }
)
"""Names that other programs and data sets gave."""

LONGEST_TEXT: Final = 60
"""Characters of a string that counts as a name: a key, a column, a label."""


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield whatever a module defines, uses or spells out as a short text."""
    for part in ast.walk(tree):
        match part:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(text)) if len(text) < LONGEST_TEXT:
                yield from text.split(".")


def mentioned(tree: ast.Module) -> Iterator[str]:
    """Yield the names between double backticks in a module's docstrings."""
    for part in ast.walk(tree):
        match part:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from NAME.findall(text)


def leads_somewhere(name: str, known: frozenset[str]) -> bool:
    """Whether a name is one of the code; one that begins with a room, of a module or of something in one."""
    *path, last = name.split(".")
    if len(path) > 1 and path[0] in PRODUCT and f"{path[0]}.{path[1]}" in modules():
        return name in modules() or (".".join(path) in modules() and last in known)
    return last in known or name in FOREIGN or name.isupper()


def test_a_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for module, tree in modules().items():
        for part in ast.walk(tree):
            if isinstance(part, ast.ClassDef):
                places[part.name].append(module)
    twice = [
        f"{name} is a class of {' and of '.join(found)}: rename one after what only it is"
        for name, found in sorted(places.items())
        if len(found) > 1
    ]
    assert twice == []


def test_foreign_names_are_mentioned() -> None:
    assert FOREIGN - {name for tree in modules().values() for name in mentioned(tree)} == set()


def test_a_name_in_a_docstring_leads_somewhere() -> None:
    known = frozenset(
        name for module, tree in modules().items() for name in (*module.split("."), *names_in(tree))
    )
    lost = [
        f"{module}: ``{name}`` is nowhere in the code: name what it became, or add it to FOREIGN"
        for module, tree in modules().items()
        for name in mentioned(tree)
        if not leads_somewhere(name, known)
    ]
    assert lost == []
