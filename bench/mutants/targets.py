"""Where faults are planted: modules that decide, and those through which bytes reach a disk or a peer."""

import tomllib
from pathlib import Path
from typing import Final

CONTRACT: Final = "decisions are pure"
"""How the import contract begins whose modules are targets."""

BESIDE: Final = (
    "node.rpc",
    "node.weights.store",
    "node.coordinator.ledger.ledger_file",
    "node.relay.rollout_spool",
    "node.coordinator.spool",
    "node.durable",
    "sampler.versions.delta_log",
)
"""Targets that are not pure; a name is a module or a package."""


def modules(root: Path) -> list[str]:
    """Return the files that faults are planted in, relative to ``root``.

    Raises:
        ValueError: a name is neither a module nor a package, or the contract is not there.
    """
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    pure = [contract["source_modules"] for contract in contracts if contract["name"].startswith(CONTRACT)]
    if len(pure) != 1:
        raise ValueError(f"pyproject.toml has {len(pure)} import contracts {CONTRACT!r}, not one")
    found: set[str] = set()
    for name in (*pure[0], *BESIDE):
        stem = root / name.replace(".", "/")
        files = sorted(stem.rglob("*.py")) if stem.is_dir() else [stem.with_suffix(".py")]
        if not files[0].exists():
            raise ValueError(f"{name} is neither a module nor a package")
        found.update(str(file.relative_to(root)) for file in files)
    return sorted(found)
