"""Scores of versions: samplers' answers to held-out prompts, one by one and together; pure.

One sampler's word never decides a score. A prompt's value is the median of what samplers say. Of two that are
further apart than sampling explains, the lower one counts until a third is asked, so that nobody gains by a
lie. A sampler whose differences from the others all point one way is left out, where leaving it out explains
the disagreement; of two that are alone, nobody can say which.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, TypeAlias

import numpy as np

from node.rollout import RolloutGroup, mean_metrics
from node.run import REWARD, Evaluation

Said: TypeAlias = Mapping[int, Mapping[str, float]]
"""Prompt -> sampler -> what its group says."""

WIDE: Final = 16.0
"""Differences beyond so many lower quartiles of all are not sampling: 5 standard deviations of normal ones.
A liar moves the lower quartile only by lying in three quarters of the prompts, which is one-sided."""

FEW: Final = 4
"""Differences of which no quartile is worth anything."""

ONE_SIDED: Final = 4.0
"""Standard deviations of a fair coin's sum, sqrt(n), that signs of differences may be off: 17 of 17 or
41 of 52. By chance one sampler in 16 000 evaluations is."""

_SAME: Final = 1e-6
"""Relative difference that float32 makes."""


@dataclass(frozen=True, slots=True)
class PromptScore:
    """The group with which one sampler answered one prompt, in numbers."""

    slot: int
    sampler_id: str
    reward_mean: float
    cut_completions: int
    tokens: int
    metrics: str = ""
    """The grader's metrics besides the reward, by name, as a JSON object; empty if there are none."""

    @property
    def values(self) -> dict[str, float]:
        return {**_from_json(self.metrics), REWARD: self.reward_mean}


def prompt_score(slot: int, sampler_id: str, group: RolloutGroup) -> PromptScore:
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
    if not evaluation.has_score:
        return None
    if best_by == REWARD:
        return evaluation.reward_mean
    return _from_json(evaluation.metrics).get(best_by)


def _from_json(metrics: str) -> dict[str, float]:
    named: dict[str, float] = json.loads(metrics or "{}")
    return named


def _to_json(metrics: dict[str, float]) -> str:
    return json.dumps(metrics) if metrics else ""


def widest_difference(said: Said, *, is_exact: bool) -> float:
    """Return how far two samplers may be apart on one prompt before the lower one counts.

    Args:
        is_exact: The likeliest token was taken each time, so that they differ by numerics only.
    """
    apart = sorted(_apart(*values.values()) for values in said.values() if len(values) == 2)
    apart = [difference for difference in apart if difference > 0]
    return 0.0 if is_exact or len(apart) < FEW else WIDE * apart[len(apart) // 4]


def is_contested(values: Iterable[float], *, widest: float) -> bool:
    """Whether two samplers are further apart than ``widest``, and a third has not been heard."""
    given = tuple(values)
    return len(given) == 2 and _apart(*given) > widest


def agreed(values: Iterable[float], *, widest: float) -> float:
    """Return what samplers say of a prompt together."""
    given = tuple(values)
    return min(given) if is_contested(given, widest=widest) else median(given)


def odd_ones_out(said: Said) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the samplers that are to be left out, and those that disagree without anyone to decide."""
    left_out: list[str] = []
    while suspects := _one_sided(said):
        explained = {one: len(_one_sided(_without(said, one))) for one in suspects}
        best = sorted(explained, key=lambda one: (explained[one], one))
        if len(best) > 1 and explained[best[0]] == explained[best[1]]:
            return tuple(sorted(left_out)), tuple(sorted(suspects))
        left_out.append(best[0])
        said = _without(said, best[0])
    return tuple(sorted(left_out)), ()


def _one_sided(said: Said) -> set[str]:
    """Return the samplers whose differences from the median of the others point one way."""
    signs: dict[str, list[int]] = {}
    for values in said.values():
        for sampler, value in values.items():
            others = [other for name, other in values.items() if name != sampler]
            if others and _apart(value, median(others)) > 0:
                signs.setdefault(sampler, []).append(1 if value > median(others) else -1)
    return {sampler for sampler, ones in signs.items() if abs(sum(ones)) > ONE_SIDED * len(ones) ** 0.5}


def _without(said: Said, sampler: str) -> Said:
    return {
        prompt: {name: value for name, value in values.items() if name != sampler}
        for prompt, values in said.items()
    }


def _apart(one: float, other: float) -> float:
    """Return the difference of two values; 0 where float32 would make it."""
    difference = abs(one - other)
    return difference if difference > _SAME * max(1.0, abs(one), abs(other)) else 0.0
