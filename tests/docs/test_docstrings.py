"""Docstrings begin with a verb or a noun, as a native engineer writes them."""

import ast
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("bench", "deploy", "learner", "node", "sampler", "tests")
OPENINGS: Final = ("Give ", "Have ", "Of ", "Those ", "What ", "Whoever ")


def test_no_docstring_begins_with_a_clause_in_place_of_a_noun() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text.partition(chr(10))[0]}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(text := node.value.value, str) and text.lstrip().startswith(OPENINGS)
    ]
    assert found == []
