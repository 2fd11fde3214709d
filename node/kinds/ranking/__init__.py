"""Policies that put candidates in order: an action is a candidate, drawn from those not ranked yet."""

from collections.abc import Mapping
from typing import Any, Final

from node.kinds.kind import Kind


def problem_of(config: Mapping[str, Any]) -> str | None:
    """Return why a sequence classifier cannot rank: it has other labels than a single score."""
    labels = len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
    return None if labels == 1 else f"has {labels} labels; one that ranks has a single score, num_labels=1"


KIND: Final = Kind(
    "ranking",
    has_architecture=lambda name: name.endswith("ForSequenceClassification"),
    problem_of=problem_of,
    model_class="transformers:AutoModelForSequenceClassification",
    scorer="node.kinds.ranking.scorer:RankingScorer",
    engine="node.kinds.ranking.engine:RankingEngine",
    tokenizer="node.kinds.ranking.tokenizer:ranking_tokenizer",
)
