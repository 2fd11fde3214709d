"""The score of a version: what samplers' answers to its held-out prompts come to; pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import TypeAlias

import numpy as np

from node.coordinator.work.slots.slot import HeldOutAnswer, Slot, SlotState, version_and_place
from node.values.evaluation import REWARD, Evaluation
from node.values.groups.rollout import RolloutGroup, mean_metrics

_ByPrompt: TypeAlias = Mapping[int, Mapping[str, HeldOutAnswer]]
"""Prompt -> sampler -> its answer."""


def answer_of(group: RolloutGroup) -> HeldOutAnswer:
    return HeldOutAnswer(
        group.reward_mean,
        cut_completions=sum(not completion.is_finished for completion in group.completions),
        tokens=group.drawn_tokens,
        metrics=group.metric_means,
    )


def progress(evaluation: Evaluation, slots: Iterable[Slot]) -> Evaluation:
    """Return an evaluation with the answers counted that it has so far."""
    return _counted(evaluation, _by_prompt(evaluation, slots))


def scored(evaluation: Evaluation, slots: Iterable[Slot], *, finished_at_s: float) -> Evaluation:
    r"""Return an evaluation as it ends: with a score, if enough of its prompts were answered.

    With r_i the reward of prompt i, over the n prompts answered: the mean, and its standard error between
    prompts, sqrt(sum_i (r_i - r)^2 / (n - 1) / n). Completions of one prompt are not independent samples. The
    order of ``slots`` does not matter.
    """
    by_prompt = _by_prompt(evaluation, slots)
    bare = replace(
        _counted(evaluation, by_prompt),
        finished_at_s=finished_at_s,
        reward_mean=None,
        reward_standard_error=None,
        cut_ratio=None,
        tokens_mean=None,
        metrics="",
    )
    if not bare.is_covered:
        return bare
    is_exact = evaluation.temperature == 0
    values = [_value(answers.values(), is_exact=is_exact) for answers in by_prompt.values()]
    rewards = np.sort([one[REWARD] for one in values])
    metrics = mean_metrics({k: v for k, v in one.items() if k != REWARD} for one in values)
    answers = [answer for of_prompt in by_prompt.values() for answer in of_prompt.values()]
    n, completions = len(values), len(answers) * evaluation.completions
    return replace(
        bare,
        reward_mean=float(rewards.mean()),
        reward_standard_error=float(rewards.std(ddof=1) / n**0.5) if n > 1 else None,
        cut_ratio=sum(answer.cut_completions for answer in answers) / completions,
        tokens_mean=sum(answer.tokens for answer in answers) / completions,
        metrics=json.dumps(metrics) if metrics else "",
    )


def _by_prompt(evaluation: Evaluation, slots: Iterable[Slot]) -> _ByPrompt:
    """Return the answers that count. Slots ``prompts`` places apart are of the same prompt."""
    found: dict[int, dict[str, HeldOutAnswer]] = {}
    for slot in slots:
        if slot.state is SlotState.EVALUATED and slot.answer is not None:
            _, place = version_and_place(slot.number)
            found.setdefault(place % evaluation.prompts, {})[slot.winning_holder] = slot.answer
    return found


def _counted(evaluation: Evaluation, by_prompt: _ByPrompt) -> Evaluation:
    return replace(
        evaluation,
        counted_prompts=len(by_prompt),
        answers=sum(map(len, by_prompt.values())),
        samplers=len({name for answers in by_prompt.values() for name in answers}),
    )


def _value(answers: Iterable[HeldOutAnswer], *, is_exact: bool) -> Mapping[str, float]:
    """Return what the answers to one prompt say together, by measure.

    At temperature 0 two samplers differ by numerics only, and the lower counts: nobody gains by a lie. Where
    completions are drawn, the lower of two would be lower than one, so it is their mean.
    """
    said: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in ((REWARD, answer.reward_mean), *answer.metrics.items()):
            said.setdefault(name, []).append(value)
    return {name: min(values) if is_exact else fmean(values) for name, values in said.items()}
