"""Docstrings begin with a verb or a noun, as a native engineer writes them."""

import ast
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("bench", "deploy", "learner", "node", "sampler", "tests")
OPENINGS: Final = ("What ", "Of ", "Those ", "Whoever ")

NOT_YET: Final = (
    "learner",
    "node/coordinator",
    "node/rollout",
    "node/serving",
    "node/weights",
    "sampler",
    "tests/conformance",
    "tests/integration",
    "tests/property",
    "tests/unit",
)
"""Places to be rewritten; each goes from here as it is."""


def test_no_docstring_begins_with_a_clause_in_place_of_a_noun() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    files = {str(path.relative_to(ROOT)): path for path in paths}
    found = [
        f"{name}:{node.lineno}: {text.partition(chr(10))[0]}"
        for name, path in files.items()
        if not name.startswith(NOT_YET)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(text := node.value.value, str) and text.lstrip().startswith(OPENINGS)
    ]
    assert found == []
