"""What a group's own tokens are worth, compared with the rewards that it claims; pure."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.rollout import RewardCheck, RewardFinding, RolloutGroup
from sampler.engines.stop_strings import text_before_stop
from sampler.tasks.task import CompletionText

TOLERANCE: Final = 1e-4
"""Of a reward, or of a part of it beyond 1: rewards travel as float32, and sums may be added up in another
order elsewhere."""

_NAMED: Final = 3
"""Completions that a finding names."""


def completion_texts(group: RolloutGroup, decode: Callable[[NDArray[np.int32]], str]) -> list[CompletionText]:
    """Return what its grader saw of a group whose task does not reply."""
    return [
        CompletionText(
            text_before_stop(decode(one.token_ids), group.sampling.stop), len(one.token_ids), one.finish.value
        )
        for one in group.completions
    ]


def compared(group: RolloutGroup, rewards: Sequence[float]) -> RewardFinding:
    """Return what the grader's rewards say of a group."""
    odd = [
        f"completion {number} claims {one.reward:g}, the grader gives {reward:g}"
        for number, (one, reward) in enumerate(zip(group.completions, rewards, strict=True))
        if abs(one.reward - reward) > TOLERANCE * max(1.0, abs(reward))
    ]
    if not odd:
        return RewardFinding(group.group_id, RewardCheck.AGREED)
    more = f", and {len(odd) - _NAMED} more" if len(odd) > _NAMED else ""
    return RewardFinding(group.group_id, RewardCheck.DISAGREED, "; ".join(odd[:_NAMED]) + more)
