"""Docstrings begin with a verb or a noun, as a native engineer writes them."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("bench", "deploy", "learner", "node", "sampler", "tests")
CLAUSE: Final = "Give|Have|Likewise|Of|That|Those|What|Whoever"
OPENING: Final = re.compile(rf'^\s*[rf]?"""\s*(?:{CLAUSE})\b.*', re.MULTILINE)


def test_no_docstring_begins_with_a_clause_in_place_of_a_noun() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {docstring.strip()}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for docstring in OPENING.findall(path.read_text())
    ]
    assert found == []
