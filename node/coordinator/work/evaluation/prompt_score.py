"""What one held-out prompt says of a version, and what all of them say together; pure."""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from node.rollout import RolloutGroup, mean_metrics
from node.run import Evaluation


@dataclass(frozen=True, slots=True)
class PromptScore:
    """The group of one prompt, in numbers."""

    slot: int
    reward_mean: float
    cut_completions: int
    """Ended at the length limit."""
    tokens: int
    oldest_version: int
    newest_version: int
    metrics: str = ""
    """What the grader measured besides the reward, by name, as a JSON object; empty: nothing."""


def prompt_score(slot: int, group: RolloutGroup) -> PromptScore:
    """Return the score of the group that answers a slot."""
    return PromptScore(
        slot,
        reward_mean=group.reward_mean,
        cut_completions=sum(not completion.is_finished for completion in group.completions),
        tokens=group.drawn_tokens,
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
        metrics=_to_json(group.metric_means),
    )


def scored(evaluation: Evaluation, scores: Collection[PromptScore], *, dropped: int) -> Evaluation:
    """Return an evaluation with the scores of its prompts so far.

    The standard error is between prompts, sqrt(sum (r_i - r)^2 / (n - 1) / n) with r_i the mean reward of
    prompt i: completions of one prompt are no independent samples. The order of ``scores`` does not matter.
    """
    n = len(scores)
    if not n:
        return replace(evaluation, dropped_prompts=dropped)
    rewards = np.sort([score.reward_mean for score in scores])
    completions = n * evaluation.completions
    return replace(
        evaluation,
        counted_prompts=n,
        dropped_prompts=dropped,
        reward_mean=float(rewards.mean()),
        reward_standard_error=float(rewards.std(ddof=1) / n**0.5) if n > 1 else 0.0,
        cut_ratio=sum(score.cut_completions for score in scores) / completions,
        tokens_mean=sum(score.tokens for score in scores) / completions,
        oldest_version=min(score.oldest_version for score in scores),
        newest_version=max(score.newest_version for score in scores),
        metrics=_to_json(mean_metrics(json.loads(score.metrics or "{}") for score in scores)),
    )


def _to_json(metrics: dict[str, float]) -> str:
    return json.dumps(metrics) if metrics else ""
