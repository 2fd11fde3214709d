"""What one sampler's answer to a held-out prompt says of a version, and what all say together; pure."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from node.coordinator.work.evaluation.agreement import Said, agreed, odd_ones_out, widest_difference
from node.rollout import RolloutGroup, mean_metrics
from node.run import REWARD, Evaluation


@dataclass(frozen=True, slots=True)
class PromptScore:
    """The group with which one sampler answered one prompt, in numbers."""

    slot: int
    sampler_id: str
    reward_mean: float
    cut_completions: int
    """Ended at the length limit."""
    tokens: int
    metrics: str = ""
    """What the grader measured besides the reward, by name, as a JSON object; empty: nothing."""

    @property
    def values(self) -> dict[str, float]:
        """The reward and what else was measured, by name."""
        return {**_from_json(self.metrics), REWARD: self.reward_mean}


def prompt_score(slot: int, sampler_id: str, group: RolloutGroup) -> PromptScore:
    """Return the score of the group that answers a slot."""
    return PromptScore(
        slot,
        sampler_id,
        reward_mean=group.reward_mean,
        cut_completions=sum(not completion.is_finished for completion in group.completions),
        tokens=group.drawn_tokens,
        metrics=_to_json(group.metric_means),
    )


def by_prompt(scores: Iterable[PromptScore], *, prompts: int) -> dict[int, dict[str, PromptScore]]:
    """Return prompt -> sampler -> its answer. Slots ``prompts`` apart are of the same prompt."""
    found: dict[int, dict[str, PromptScore]] = {}
    for score in scores:
        found.setdefault(score.slot % prompts, {})[score.sampler_id] = score
    return found


def scored(evaluation: Evaluation, scores: Collection[PromptScore], *, dropped: int) -> Evaluation:
    """Return an evaluation with these answers to its prompts.

    The standard error is between prompts, sqrt(sum (r_i - r)^2 / (n - 1) / n) with r_i what samplers agree is
    the reward of prompt i: completions of one prompt are not independent samples. The order of ``scores``
    does not matter.
    """
    answers = by_prompt(scores, prompts=evaluation.prompts)
    n = len(answers)
    values = _agreed_values(answers, is_exact=evaluation.temperature == 0)
    rewards = np.sort([one[REWARD] for one in values])
    metrics = mean_metrics({k: v for k, v in one.items() if k != REWARD} for one in values)
    completions = len(scores) * evaluation.completions
    return replace(
        evaluation,
        counted_prompts=n,
        dropped_prompts=dropped,
        reward_mean=float(rewards.mean()) if n else 0.0,
        reward_standard_error=float(rewards.std(ddof=1) / n**0.5) if n > 1 else 0.0,
        cut_ratio=sum(score.cut_completions for score in scores) / completions if n else 0.0,
        tokens_mean=sum(score.tokens for score in scores) / completions if n else 0.0,
        metrics=_to_json(metrics),
        answers=len(scores),
        samplers=len({score.sampler_id for score in scores}),
    )


def said_of(answers: dict[int, dict[str, PromptScore]], name: str) -> Said:
    """Return what samplers say of each prompt by one measure, where they have it."""
    return {
        prompt: {
            sampler: value
            for sampler, score in of_prompt.items()
            if (value := score.values.get(name)) is not None
        }
        for prompt, of_prompt in answers.items()
    }


def odd_answers(
    answers: dict[int, dict[str, PromptScore]], names: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the samplers whose answers are left out, and those that disagree, by any of these measures."""
    left_out: set[str] = set()
    disputed: set[str] = set()
    for name in names:
        odd, undecided = odd_ones_out(said_of(answers, name))
        left_out |= set(odd)
        disputed |= set(undecided)
    return tuple(sorted(left_out)), tuple(sorted(disputed - left_out))


def _agreed_values(answers: dict[int, dict[str, PromptScore]], *, is_exact: bool) -> list[dict[str, float]]:
    """Return the agreed values of each prompt, by name."""
    names = {name for of_prompt in answers.values() for score in of_prompt.values() for name in score.values}
    values: dict[int, dict[str, float]] = {prompt: {} for prompt in answers}
    for name in sorted(names):
        said = said_of(answers, name)
        widest = widest_difference(said, is_exact=is_exact)
        for prompt, of_prompt in said.items():
            if of_prompt:
                values[prompt][name] = agreed(of_prompt.values(), widest=widest)
    return list(values.values())


def decider(evaluation: Evaluation, best_by: str) -> float | None:
    """Return the number by which versions are compared; None: the evaluation lacks it."""
    if best_by == REWARD:
        return evaluation.reward_mean
    return _from_json(evaluation.metrics).get(best_by)


def _from_json(metrics: str) -> dict[str, float]:
    named: dict[str, float] = json.loads(metrics or "{}")
    return named


def _to_json(metrics: dict[str, float]) -> str:
    return json.dumps(metrics) if metrics else ""
