"""Descriptions of kinds: where the halves of one are, by import path; nothing is imported before its use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """The meaning of a row, an action and a score. Paths are ``package.module:attribute``."""

    name: str
    """The name of its task and its engine, too."""
    has_architecture: Callable[[str], bool]
    """Whether a class of this name, as config.json has it, is a model of this kind."""
    model_class: str
    """Its class for learners, with ``from_pretrained``."""
    problem_of: Callable[[Mapping[str, Any]], str | None] = lambda config: None
    """Returns why a model with this config.json cannot be used; None: it can."""
    scorer: str | None = None
    """``(model, *, compute_dtype) -> learner.model.scorer.Scorer``; None: tokens are scored."""
    engine: str | None = None
    """``(EngineSettings) -> sampler.engines.engine.Engine``; None: the engines that write text."""
    tokenizer: str | None = None
    """``(ModelTokenizer, model_dir) -> sampler.engines.engine.Tokenizer``; None: the model's own."""
    can_be_shared: bool = True
    """Whether several ranks of a learner can hold a model of this kind."""
