"""The kinds of policies, and how a model directory says which one it is."""

import enum
import json
from pathlib import Path
from typing import Any

from node.errors import StartupError


class PolicyKind(enum.StrEnum):
    """The meaning of a row, an action and a score."""

    CAUSAL_LM = "causal_lm"
    """An action is a token, drawn after all before it."""
    RANKING = "ranking"
    """An action is a candidate, drawn from those not ranked yet; see ``node.rankings``."""
    NOISE_MASK = "noise_mask"
    """An action is a real number for each cell of a grid over an image; see ``node.noise_masks``."""


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


def kind_of(model_dir: Path) -> PolicyKind:
    """Return the kind of a model directory, by its architecture; a sequence classifier with one label ranks.

    Nobody has to be told: peers whose models have other tensors are refused when they join.

    Raises:
        StartupError: as ``model_config``; or it classifies.
    """
    if not (model_dir / "config.json").exists():
        return PolicyKind.CAUSAL_LM  # whoever loads it says what it lacks
    config = model_config(model_dir)
    architectures = config.get("architectures") or ()
    if "NoiseMaskModel" in architectures:
        return PolicyKind.NOISE_MASK
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return PolicyKind.CAUSAL_LM
    labels = len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
    if labels != 1:
        raise StartupError(
            f"the model in {model_dir} has {labels} labels, and one that ranks has a single score",
            fix="Load it with num_labels=1, and save it again",
        )
    return PolicyKind.RANKING
