"""Docstrings begin with a verb or a noun, as a native engineer writes them."""

import ast
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
OPENINGS: Final = ("What ", "Of ", "Those ", "Whoever ")

NOT_YET: Final = (
    "learner",
    "node/clients",
    "node/coordinator",
    "node/relay",
    "node/rollout",
    "node/rpc",
    "node/serving",
    "node/weights",
    "node/wire",
    "sampler",
    "tests/conformance",
    "tests/integration",
    "tests/property",
    "tests/unit",
)
"""Places to be rewritten; each goes from here as it is."""


def test_no_docstring_begins_with_a_clause_in_place_of_a_noun() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [
        f"{file}:{node.lineno}: {text.partition(chr(10))[0]}"
        for file in listed.stdout.splitlines()
        if "_pb2" not in file and not file.startswith(NOT_YET) and (ROOT / file).is_file()
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(text := node.value.value, str) and text.lstrip().startswith(OPENINGS)
    ]
    assert found == []
