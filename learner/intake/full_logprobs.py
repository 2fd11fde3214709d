"""Behaviour logprobs of what the policy drew, under the whole softmax, whatever the sampler cut off."""

import numpy as np
import torch
from numpy.typing import NDArray

from learner.objective.truncation import untruncated_logprob
from node.rollout import Completion, RolloutGroup


def full_logprobs(group: RolloutGroup) -> list[NDArray[np.float32]]:
    """Return the behaviour logprobs of each completion's drawn tokens under the whole softmax.

    Raises:
        ValueError: they are renormalised, and the kept masses that would undo this are missing.
    """
    if not group.is_renormalised:
        return [completion.of_drawn(completion.behaviour_logprob) for completion in group.completions]
    return [completion.of_drawn(_untruncated(completion)) for completion in group.completions]


def _untruncated(completion: Completion) -> NDArray[np.float32]:
    if completion.kept_mass is None:
        raise ValueError("logprobs are renormalised over the tokens kept, and there are no kept masses")
    columns = (torch.from_numpy(c.copy()) for c in (completion.behaviour_logprob, completion.kept_mass))
    logprob: NDArray[np.float32] = untruncated_logprob(*columns).numpy()
    return logprob
