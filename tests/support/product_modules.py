"""The product's modules as syntax trees."""

import ast
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = ("node", "learner", "sampler")


@cache
def modules() -> dict[str, ast.Module]:
    """Parse the product; by dotted name."""
    paths = (path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py")))
    return {dotted(path): ast.parse(path.read_text()) for path in paths}


def dotted(path: Path) -> str:
    """Return the name by which a file of the repository is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
