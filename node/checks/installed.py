"""Checks of what was put on this machine for a role: packages and models. Sections of roles list theirs."""

import json
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from node.checks.check import Check, Finding, Grade, Needs
from node.errors import ConfigError, StartupError
from node.identity.files import cannot_read
from node.system.extras import NeededPackage


def packages_check(packages: Iterable[NeededPackage]) -> Check:
    """Return the check that a role's packages are installed."""
    return Check("packages", Needs.PACKAGES, partial(_packages, tuple(packages)))


def model_check(model_dir: Path, *, key: str, needs_weights: bool = True) -> Check:
    """Return the check of the model directory that ``key`` names, as far as one sees without torch."""
    return Check("model", Needs.MODEL, partial(_model, model_dir, key=key, needs_weights=needs_weights))


def _packages(packages: tuple[NeededPackage, ...]) -> Iterator[Finding]:
    faults = []
    for needed in packages:
        try:
            needed.check()
        except ConfigError as fault:
            faults.append(Finding.of_fault("packages", fault))
    yield from faults
    if packages and not faults:
        names = ", ".join(dict.fromkeys(needed.package for needed in packages))
        yield Finding("packages", Grade.OK, f"installed: {names}")


def _model(model_dir: Path, *, key: str, needs_weights: bool) -> Iterator[Finding]:
    weights = "model.safetensors (or its shards and their index) " if needs_weights else ""
    fix = (
        f"{key} is a directory on this machine with config.json, {weights}and tokenizer.json, as "
        "transformers saves them; a model of the Hub is downloaded there first."
    )
    try:
        names = {entry.name for entry in os.scandir(model_dir)}
    except OSError as error:
        raise cannot_read(model_dir, error, fix=fix) from error
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if needs_weights and not names & {"model.safetensors", "model.safetensors.index.json"}:
        missing.insert(1, "model.safetensors")
    if missing:
        raise StartupError(f"{model_dir} has no {', no '.join(missing)}", fix=fix)
    try:
        for name in ("config.json", "tokenizer.json"):
            if not isinstance(json.loads((model_dir / name).read_bytes()), dict):
                raise StartupError(f"{model_dir / name} is not a JSON object", fix=fix)
        if needs_weights:
            # Only here: sections of the configuration list this check and load without safetensors.
            from node.weights.format.model_files import StoredDtypes

            StoredDtypes.of(model_dir)
    except OSError as error:
        raise cannot_read(Path(error.filename or model_dir), error, fix=fix) from error
    except ValueError as error:
        raise StartupError(f"{model_dir} is damaged: {str(error).splitlines()[0]}", fix=fix) from error
    what = "its files are there and readable" if needs_weights else "what a tokenizer needs is there"
    yield Finding("model", Grade.OK, f"{model_dir}: {what}")
