"""Which versions are evaluated, on what and how; values only."""

import json
from dataclasses import dataclass
from typing import Final

from node.evaluation import REWARD, Evaluation, EvaluationTerms
from node.sampling_parameters import SamplingParameters


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    every_versions: int
    prompts: int
    completions: int
    temperature: float
    """As configured; 0: the most likely token each time."""
    sampling: SamplingParameters
    """As leased."""
    held_out_prompts: int
    """How many of the task's own last prompts are these; 0: they come after its prompts, as rows."""
    task: str = ""
    task_options: str = ""
    """Digest of the task's options; empty: it has none."""
    best_by: str = REWARD
    """The metric that picks the best version: the reward, or one of the grader's."""

    def terms(self, first_prompt: int) -> EvaluationTerms:
        return self.begun(0, first_prompt=first_prompt, now=0.0).terms

    def begun(self, version: int, *, first_prompt: int, now: float) -> Evaluation:
        return Evaluation(
            version=version,
            first_prompt=first_prompt,
            prompts=self.prompts,
            completions=self.completions,
            temperature=self.temperature,
            max_new_tokens=self.sampling.max_new_tokens,
            started_at_s=now,
            sampling=self._other_terms,
            best_by=self.best_by,
        )

    @property
    def _other_terms(self) -> str:
        """Return ``Evaluation.sampling``. What cuts the vocabulary never cuts the likeliest token."""
        names = ("stop",) if self.temperature == 0 else ("top_p", "top_k", "min_p", "stop")
        given = {name: getattr(self.sampling, name) for name in names}
        changed = {name: value for name, value in given.items() if value != getattr(_PLAIN, name)}
        changed |= {name: value for name in ("task", "task_options") if (value := getattr(self, name))}
        return json.dumps(changed) if changed else ""


_PLAIN: Final = SamplingParameters(1.0, 1.0, 0, 1)

NO_EVALUATION: Final = EvaluationSettings(0, 0, 0, 0.0, _PLAIN, 0)
