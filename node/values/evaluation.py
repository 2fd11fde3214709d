"""How policy versions do on held-out prompts, and which one is the best; values only.

Whoever names the best version asks ``best_of``: `status`, the run's page, the report, the learner's export.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from node.values.fact import Fact

REWARD: Final = "reward"
"""The measure that versions are compared by unless ``evaluation.best_by`` names another."""

COVERAGE_PERCENT: Final = 90
"""Share of its prompts that have to be answered for a version to have a score. A mean over fewer is one over
another set of prompts: those that are not answered may well be the hard ones."""

EvaluationTerms: TypeAlias = tuple[int, int, int, float, int, str]
"""See ``Evaluation.terms``."""


@dataclass(frozen=True, slots=True)
class Evaluation(Fact):
    """How a version does on held-out prompts; fields as in membership.proto, and in the ledger."""

    kind: ClassVar[str] = "evaluation"

    version: int
    """The version that drew every token."""
    first_prompt: int
    """Index in the task; the others follow."""
    prompts: int
    completions: int
    """Completions of each prompt."""
    temperature: float
    """0: the most likely token each time."""
    max_new_tokens: int
    started_at_s: float
    finished_at_s: float = 0.0
    """Unix seconds, as the start; 0: under way."""
    sampling: str = ""
    """Everything else its score depends on that was not at its default, as JSON; empty: nothing.

    The task's name and the digest of its options are in it too: grader, answer and prompt are among them.
    """
    best_by: str = REWARD
    """The measure by which the run compared versions when it began."""
    counted_prompts: int = 0
    """Prompts answered."""
    answers: int = 0
    """Groups that count: a prompt that no verifier checks is asked of two samplers, where there are two."""
    samplers: int = 0
    """Samplers whose groups count."""
    reward_mean: float | None = None
    """Over the prompts answered, of the mean reward of their completions. None, as what follows: it has no
    score, because it is under way or too few of its prompts were answered."""
    reward_standard_error: float | None = None
    """Between prompts; None also where a single prompt counts."""
    cut_ratio: float | None = None
    """Share of completions that ended at the length limit."""
    tokens_mean: float | None = None
    """Mean tokens of a completion."""
    metrics: str = ""
    """Means of grader metrics besides the reward, as a JSON object; empty: none."""

    @property
    def key(self) -> str:
        return str(self.version)

    @property
    def terms(self) -> EvaluationTerms:
        """Its prompts and how they are sampled and graded; scores are compared only where these are equal."""
        return (
            self.first_prompt,
            self.prompts,
            self.completions,
            self.temperature,
            self.max_new_tokens,
            self.sampling,
        )

    @property
    def has_score(self) -> bool:
        return self.reward_mean is not None

    @property
    def waiting_prompts(self) -> int:
        """Prompts without an answer that counts."""
        return self.prompts - self.counted_prompts

    @property
    def is_covered(self) -> bool:
        """Whether enough of its prompts were answered for a score."""
        return 100 * self.counted_prompts >= COVERAGE_PERCENT * self.prompts

    @property
    def metric_means(self) -> dict[str, float]:
        """``metrics`` by name."""
        named: dict[str, float] = json.loads(self.metrics or "{}")
        return named

    @property
    def score_text(self) -> str:
        """The mean reward with its standard error, for people."""
        if self.reward_mean is None:
            return "no score"
        error = "" if self.reward_standard_error is None else f" +- {self.reward_standard_error:.3f}"
        return f"{self.reward_mean:.3f}{error}"

    def score_by(self, name: str) -> str:
        """Return the score by a measure, for people, with the reward beside any other."""
        value = self.measured(name)
        return (
            self.score_text
            if name == REWARD or value is None
            else f"{name} {value:.3f}, reward {self.score_text}"
        )

    def measured(self, name: str) -> float | None:
        """Return what versions are compared by; None: it has no score, or its graders did not measure it."""
        if self.reward_mean is None:
            return None
        return self.reward_mean if name == REWARD else self.metric_means.get(name)


@dataclass(frozen=True, slots=True)
class EvaluationStatus:
    """The evaluations worth a look."""

    newest: Evaluation | None = None
    """Finished, as ``first`` and ``best``; it may have no score."""
    first: Evaluation | None = None
    """The oldest of those that ``best`` is chosen of."""
    best: Evaluation | None = None
    """See ``best_of``."""
    under_way: Evaluation | None = None
    best_by: str = REWARD
    """The reward or a metric."""


NO_EVALUATIONS: Final = EvaluationStatus()


@dataclass(frozen=True, slots=True)
class EvaluationNotice:
    """Versions of which the learner keeps the masters, as a heartbeat's answer tells it."""

    best: int | None = None
    """As in ``EvaluationStatus``. None: no version has a score, and the best that is known stays."""
    under_way: int | None = None
    """Or due."""
    announced: int = 0
    """The newest announced version then, 0 before the first. An evaluation that has begun since is of this
    version or a newer one, or of ``under_way`` or one soon after it."""
    is_evaluated: bool = False
    """Whether the run evaluates versions: then only an evaluation says which is the best."""
    is_told: bool = False
    """Whether a coordinator has told this, since the process began."""


def comparable(finished: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the evaluations with a score and the terms of the newest that has one, oldest version first."""
    scored = sorted((one for one in finished if one.has_score), key=lambda one: one.version)
    return [one for one in scored if one.terms == scored[-1].terms]


def best_of(finished: Iterable[Evaluation], by: str) -> Evaluation | None:
    """Return the evaluation with the highest score of those that compare; of equals the oldest version.

    Args:
        finished: In any order; what is under way has no score and is passed over.
        by: The reward, or a metric of the graders. An evaluation without it is never the best.
    """
    found = ((value, one) for one in comparable(finished) if (value := one.measured(by)) is not None)
    return max(found, key=lambda pair: (pair[0], -pair[1].version), default=(0.0, None))[1]


def evaluation_status(
    finished: Iterable[Evaluation], under_way: Evaluation | None, *, by: str
) -> EvaluationStatus:
    """Return what is worth a look of a run's evaluations."""
    known = tuple(finished)
    return EvaluationStatus(
        max(known, key=lambda one: one.version, default=None),
        first=next(iter(comparable(known)), None),
        best=best_of(known, by),
        under_way=under_way,
        best_by=by,
    )
