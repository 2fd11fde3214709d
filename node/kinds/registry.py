"""The kinds there are, and how a model directory says which one it is."""

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from node.errors import StartupError
from node.kinds.kind import Kind
from node.tasks.built_in_tasks import KINDS

CAUSAL_LM: Final = Kind(
    "causal_lm", has_architecture=lambda name: True, model_class="transformers:AutoModelForCausalLM"
)
"""An action is a token, drawn after all before it. Every model is one that is of no other kind."""


@cache
def other_kinds() -> tuple[Kind, ...]:
    """Return the kinds that are not language models."""
    return tuple(importlib.import_module(f"node.kinds.{name}").KIND for name in KINDS)


def model_config(model_dir: Path) -> dict[str, Any]:
    """Return the content of a model directory's config.json.

    Raises:
        StartupError: it is not there, or not a JSON object.
    """
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(
            f"{path} cannot be read: {error}", fix="Point model_dir at a model as transformers saves it"
        ) from error
    if not isinstance(config, dict):
        raise StartupError(f"{path} is not a JSON object", fix="Copy the model directory again")
    return config


def kind_of(model_dir: Path) -> Kind:
    """Return the kind of a model directory, by its architecture.

    Nobody has to be told: peers whose models have other tensors are refused when they join.

    Raises:
        StartupError: as ``model_config`` and ``kind_of_class``; or a policy of its kind cannot be made of it.
    """
    if not (model_dir / "config.json").exists():
        return CAUSAL_LM  # whoever loads it says what it lacks
    config = model_config(model_dir)
    for architecture in config.get("architectures") or ():
        kind = kind_of_class(architecture)
        if kind is CAUSAL_LM:
            continue
        if problem := kind.problem_of(config):
            raise StartupError(
                f"the model in {model_dir} {problem}", fix="Change it, and save it again; see docs/tasks.md"
            )
        return kind
    return CAUSAL_LM


def kind_of_class(name: str) -> Kind:
    """Return the kind of models whose class has this name.

    Raises:
        StartupError: several kinds claim it; none of them is more right than the others.
    """
    claimants = [kind for kind in other_kinds() if kind.has_architecture(name)]
    if len(claimants) > 1:
        names = " and ".join(kind.name for kind in claimants)
        raise StartupError(
            f"a model of the class {name} is of the kinds {names}",
            fix="Correct has_architecture of one of them, in node/kinds: a class belongs to one kind",
        )
    return claimants[0] if claimants else CAUSAL_LM
