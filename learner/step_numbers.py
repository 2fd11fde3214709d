"""The numbers of a step: one value, which is made where the step is taken.

The journal and ``steps.jsonl`` keep it; gauges, trackers and the report to the coordinator are read off its
fields. A new number is a field here and the place that measures it: ``BatchFigures.of`` of the batch alone,
``train_step`` of what the model makes of it. The help text of its gauge is in the field's metadata; a report
has those numbers that ``StepReport`` has fields for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from statistics import fmean
from typing import Any, Final, Self

import numpy as np

from node.values.groups.rollout import Finish, RolloutGroup, mean_metrics


def _gauge(help_text: str, *, name: str = "", **default: Any) -> Any:
    """Return a field that has a gauge, under its own name unless ``name`` is given."""
    return field(metadata={"help": help_text, "gauge": name}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Numbers of a batch, whatever the model makes of it."""

    reward_mean: float = _gauge("Mean reward of the newest batch.")
    reward_deviation: float = _gauge(
        "Standard deviation of rewards within a group, mean of the newest batch."
    )
    """The divisor is the group's size."""
    zero_advantage_ratio: float = _gauge("Share of the newest batch's groups whose rewards are all equal.")
    """They teach nothing."""
    completion_tokens_mean: float = _gauge("Mean length of the newest batch's completions.")
    completion_tokens_p95: float = _gauge("Length that 95 % of the newest completions do not exceed.")
    """Linearly interpolated."""
    completion_tokens_max: int = _gauge("Longest completion of the newest batch.")
    prompt_tokens_mean: float = _gauge("Mean length of the newest batch's prompts.")
    """Over groups."""
    cut_ratio: float = _gauge("Share of the newest batch's completions that ended at the token limit.")
    staleness_mean_versions: float = _gauge("Mean staleness of the newest batch's groups.")
    staleness_max_versions: int
    grader_metrics: dict[str, float]
    """Grader metrics besides the reward, by name: the mean over the groups that have it."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup], *, version: int) -> Self:
        """Measure the groups of a batch, at least one, which the policy of ``version`` is trained on."""
        completions = [completion for group in groups for completion in group.completions]
        lengths = np.array([completion.drawn_tokens for completion in completions])
        rewards = [np.array([completion.reward for completion in group.completions]) for group in groups]
        staleness_versions = [version - group.oldest_version for group in groups]
        with np.errstate(over="ignore", invalid="ignore"):  # of rewards that no step is taken on
            reward_deviation = float(np.mean([of_group.std() for of_group in rewards]))
        return cls(
            reward_mean=fmean(completion.reward for completion in completions),
            reward_deviation=reward_deviation,
            zero_advantage_ratio=float(np.mean([np.ptp(of_group) == 0 for of_group in rewards])),
            completion_tokens_mean=float(lengths.mean()),
            completion_tokens_p95=float(np.percentile(lengths, 95)),
            completion_tokens_max=int(lengths.max()),
            prompt_tokens_mean=float(np.mean([len(group.prompt_token_ids) for group in groups])),
            cut_ratio=float(np.mean([completion.finish is Finish.LENGTH for completion in completions])),
            staleness_mean_versions=fmean(staleness_versions),
            staleness_max_versions=max(staleness_versions),
            grader_metrics=mean_metrics(group.metric_means for group in groups),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """Numbers of a step, measured before the parameters moved."""

    batch: BatchFigures
    teaching_groups: int
    """Groups that teach something, see ``step_loss``. 0: nothing is changed, nor the optimizer's moments."""
    tokens: int
    """Completion tokens trained on."""
    gradient_norm: float = _gauge("Norm of the newest gradient before clipping.")
    learning_rate: float = _gauge("Of the newest step, by learner.lr_schedule.")
    """Rate of the step; of the first fast step, if the rate scales with the sample size. 0: no step."""
    kl_nats: float = _gauge("KL(behaviour || learner) per token of the newest batch.")
    reference_kl_nats: float | None = _gauge("KL(learner || base model) per token of the newest batch.")
    """None: there was no base model to compare with."""
    surprisal_nats: float = _gauge("Minus the mean learner logprob of the newest batch.")
    ess_ratio: float = _gauge("Effective sample size of the newest batch over its size.")
    """NaN where the weights are all 0 or not all finite."""
    clip_fraction: float = _gauge("Share of the newest batch that was clipped.", name="clip_ratio")
    truncated_fraction: float | None = _gauge(
        "Share of the newest batch's tokens whose ratio was cut to a ceiling.", name="truncated_ratio"
    )
    """None: the objective has no ceiling."""
    clamped_tokens: int
    """Tokens whose log ratio was clamped before exponentiation, see ``formulas.log_ratio``: somebody's
    logprobs are not the policy's."""
    read_tokens: int | None = _gauge("Positions that the model read in the newest step.", default=None)
    """Padding included, on all shares of the rows; None, as of the next one: before 0.4."""
    distinct_tokens: int | None = _gauge("Tokens of the newest step's rows, shared ones once.", default=None)
    """Without padding; a family that goes row by row shares none."""
    merged_contributions: int | None = _gauge("Contributions in the newest merge.", default=None)
    """With a change. None, as of the next ones: the step was taken here."""
    merged_norm: float | None = _gauge("Norm of the mean change of the newest merge.", default=None)
    merged_cosine_min: float | None = _gauge(
        "Least cosine of a contribution's change with the mean of the newest merge.", default=None
    )

    def flat(self) -> dict[str, Any]:
        """Return all numbers by name, those of the batch among them."""
        numbers = asdict(self)
        return {**numbers.pop("batch"), **numbers}

    def gauges(self) -> dict[str, float]:
        """Return what is known by the name of its gauge; what graders measured is ``grader_<name>``."""
        known = self.flat()
        shown = {_gauge_of(one): known[one.name] for one in _gauge_fields()}
        graded = {f"grader_{name}": value for name, value in self.batch.grader_metrics.items()}
        return {name: value for name, value in (shown | graded).items() if value is not None}


def _gauge_fields() -> Iterator[Field[Any]]:
    for one in (*fields(BatchFigures), *fields(StepNumbers)):
        if "help" in one.metadata:
            yield one


def _gauge_of(one: Field[Any]) -> str:
    return one.metadata["gauge"] or one.name


GAUGES: Final = {_gauge_of(one): one.metadata["help"] for one in _gauge_fields()}
"""Help text of each gauge, by its name without ``heterorl_learner_``."""
