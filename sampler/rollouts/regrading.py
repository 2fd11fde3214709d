"""Compares the rewards that a group claims with those that the grader gives its own tokens; pure."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from node.values.groups.reward_finding import RewardCheck, RewardFinding
from node.values.groups.rollout import Finish, RolloutGroup
from sampler.engines.text.stop_strings import text_before_stop
from sampler.tasks.task import CompletionText

TOLERANCE: Final = 1e-6
"""Largest difference of equal rewards, relative beyond 1: rewards travel as float32, which rounds by 6e-8 of
them. Far below the 1e-4 that objectives add to a group's standard deviation: differences of that size, in a
group of equal rewards, would make advantages of half a unit."""

_NAMED: Final = 3
"""Completions that a finding names."""


def completion_texts(group: RolloutGroup, texts: Sequence[str]) -> list[CompletionText]:
    """Return what its grader saw of a group whose task does not reply, by its completions' uncut texts."""
    return [
        CompletionText(text_before_stop(text, group.sampling.stop), len(one.token_ids), one.finish.value)
        for one, text in zip(group.completions, texts, strict=True)
    ]


def with_tokens(texts: Sequence[CompletionText], group: RolloutGroup, *, prompt: str) -> list[CompletionText]:
    """Return the texts of a group with what only graders see that ask for it; ``prompt`` is as rendered."""
    return [
        replace(text, token_ids=one.token_ids.tolist(), prompt=prompt)
        for text, one in zip(texts, group.completions, strict=True)
    ]


def misstated_finish(group: RolloutGroup, texts: Sequence[str], end_ids: frozenset[int] | None) -> str:
    """Return which completion cannot have ended as it says, for people; "" if all can.

    Graders read more into a text that a stop string ended.

    Args:
        texts: Of the completions, uncut.
        end_ids: The tokens that end a completion; None: it ends without one.
    """
    for number, (one, text) in enumerate(zip(group.completions, texts, strict=True)):
        if end_ids is not None and one.finish is Finish.END and int(one.token_ids[-1]) not in end_ids:
            return f"completion {number} claims to have ended, and has no end token"
        if one.finish is Finish.STOP and not any(stop in text for stop in group.sampling.stop):
            return f"completion {number} claims to have been stopped, and has no stop string"
    return ""


def compared(group: RolloutGroup, rewards: Sequence[float]) -> RewardFinding:
    """Return what the grader's rewards say of a group; NaN: the grader abstains from a completion."""
    odd = [
        f"completion {number} claims {_said(one.reward)}, the grader gives {_said(reward)}"
        for number, (one, reward) in enumerate(zip(group.completions, rewards, strict=True))
        if not _are_equal(one.reward, reward)
    ]
    if not odd:
        return RewardFinding(group.group_id, RewardCheck.AGREED)
    more = f", and {len(odd) - _NAMED} more" if len(odd) > _NAMED else ""
    return RewardFinding(group.group_id, RewardCheck.DISAGREED, "; ".join(odd[:_NAMED]) + more)


def _are_equal(claimed: float, reward: float) -> bool:
    if math.isnan(claimed) or math.isnan(reward):
        return math.isnan(claimed) and math.isnan(reward)
    return abs(claimed - reward) <= TOLERANCE * max(1.0, abs(reward))


def _said(reward: float) -> str:
    return "no reward" if math.isnan(reward) else f"{reward:g}"
