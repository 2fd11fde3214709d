"""Groups as an honest sampler would send them, with any one thing changed."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from node.values.groups.rollout import Completion, Finish, RolloutGroup
from node.values.groups.sampling_parameters import SamplingParameters

SAMPLING = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8)


def make_completion(tokens: int = 3, *, version: int = 0, reward: float = 0.0, **changes: Any) -> Completion:
    completion = Completion(
        token_ids=np.arange(tokens, dtype=np.int32),
        behaviour_logprob=np.full(tokens, -0.5, np.float32),
        policy_version=np.full(tokens, version, np.int32),
        reward=reward,
        finish=Finish.END,
    )
    return replace(completion, **changes)


def with_rewards(mean: float, *, version: int = 0, spread: float = 0.25) -> tuple[Completion, ...]:
    """Return a group's two completions, whose rewards are as far from their mean."""
    return tuple(make_completion(3, version=version, reward=mean + sign * spread) for sign in (-1, 1))


def with_replies(completion: Completion, is_drawn: list[bool]) -> Completion:
    """Return ``completion`` with tokens that the policy did not draw; the first and the last are drawn."""
    mask = np.array(is_drawn)
    source = np.flatnonzero(mask)[np.cumsum(mask) - 1]  # the last drawn token up to each
    kept_mass = completion.kept_mass
    return replace(
        completion,
        behaviour_logprob=np.where(mask, completion.behaviour_logprob, np.float32(0)),
        policy_version=completion.policy_version[source],
        kept_mass=None if kept_mass is None else np.where(mask, kept_mass, np.float32(1)),
        is_drawn=mask,
    )


def without_grades(group: RolloutGroup) -> RolloutGroup:
    """Return a group as a sampler sends it where verifiers grade."""
    completions = tuple(replace(one, reward=math.nan) for one in group.completions)
    return replace(group, completions=completions, metrics={}, graded_at_s=group.sampling_finished_at_s)


def make_group(group_id: str = "0.1", *, size: int = 2, version: int = 0, **changes: Any) -> RolloutGroup:
    group = RolloutGroup(
        run_id="run",
        group_id=group_id,
        layout_digest=b"l" * 16,
        tokenizer_digest=b"t" * 16,
        task="addition",
        prompt_index=7,
        prompt_token_ids=np.array([1, 2, 3], np.int32),
        completions=tuple(make_completion(3 + i, version=version, reward=float(i % 2)) for i in range(size)),
        sampling=SAMPLING,
        sampling_started_at_s=1.0,
        sampling_finished_at_s=2.0,
        graded_at_s=3.0,
    )
    return replace(group, **changes)
