"""The run's demands on its samplers: what a lease asks for, what grades it, what is evaluated; values only.

The task is the operator's word. What samplers say of it moves nothing, however many they are.

    number of prompts   the configuration's: ``coordinator.prompts``, the task's options or the rows of the
                        data; a sampler that found another number is refused when it joins
    grader code         ``coordinator.grader_digest``, or else what a verifier says; samplers with other code
                        are leased nothing, and verifiers with other code check nothing

Where neither says which code grades, none is refused: ``status`` shows in what the samplers differ.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from node.coordinator.work.capacity import Bounds
from node.values import limits
from node.values.evaluation import REWARD, Evaluation, EvaluationTerms
from node.values.groups.sampling_parameters import SamplingParameters

DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class RunGrader:
    """The code that the run's groups are graded by."""

    digest: bytes = b""
    """Empty: no peer of the operator's has said yet."""
    said_by: str = ""

    def objection(self, digest: bytes) -> str:
        """Return how other grader code differs from the run's; empty where it does not."""
        if digest == self.digest or not self.digest:
            return ""
        return (
            f"grader code {digest.hex() or 'without a digest'} is not the run's {self.digest.hex()}, "
            f"as {self.said_by} said"
        )


UNSAID: Final = RunGrader()


def run_grader(before: RunGrader, *, configured: bytes, verifiers: Mapping[str, bytes]) -> RunGrader:
    """Return the code to grade by, where the verifiers present say ``verifiers``, by name.

    What was said before holds as long as a verifier present says so, or none says anything.
    """
    if configured:
        return RunGrader(configured, "the coordinator's configuration")
    agreeing = (name for name, digest in verifiers.items() if digest == before.digest)
    name = next(agreeing, None) or next(iter(verifiers), None)
    return before if name is None else RunGrader(verifiers[name], f"verifier {name}")


@dataclass(frozen=True, slots=True)
class Work:
    """The terms of every lease of the run."""

    run_id: str
    task: str
    group_size: int
    sampling: SamplingParameters
    prompt_tokens: int = limits.PROMPT_TOKENS
    """Most tokens of a prompt, as far as it is known."""
    task_digest: bytes = b""
    """Digest of the task's name and options."""
    grader: RunGrader = UNSAID
    verifiers_grade: bool = False
    """Whether groups come without rewards, which verifiers then work out."""

    def objection_to_grader(self, digest: bytes) -> str:
        """Return how a sampler's grader code differs from the run's; empty where it does not, or grades
        nothing."""
        return "" if self.verifiers_grade else self.grader.objection(digest)


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


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The run's demands on its samplers, as configured."""

    work: Work
    bounds: Bounds
    prompts: int
    """The task's size, held-out prompts included."""
    prompt_seed: int
    lease_ttl_s: float
    lease_max_s: float
    """Age beyond which no heartbeat keeps a lease."""
    prompt_retry_s: float
    evaluation: EvaluationSettings = NO_EVALUATION
    check_secret: bytes = b""
    """By which groups are drawn whose rewards are checked; a new one for each process."""
    require_verifier: bool = False
    newcomers_part: float = 1.0
    """Part of a batch that newcomers may fill; see ``delivery``."""

    @property
    def training_prompts(self) -> int:
        """How many of the task's prompts may be trained on."""
        return self.prompts - self.evaluation.held_out_prompts
