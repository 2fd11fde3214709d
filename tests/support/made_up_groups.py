"""Groups made up from a seed, a float64 model to judge them, and the gradient a step applies."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner.model.model import Policy
from learner.step.train_step import StepOutcome, train_step
from learner.step_settings import StepSettings
from node.values.groups.rollout import Completion, RolloutGroup
from support.float64 import in_float64
from support.groups import SAMPLING, make_completion, make_group, with_replies

VERSION: Final = 3


def float64_policy(model_dir: Path) -> Policy:
    """Return a policy of one's own, with the base model's parameters."""
    return Policy(copy.deepcopy(_loaded(model_dir)))


@cache
def shared_policy(model_dir: Path) -> Policy:
    """Return such a policy for callers that leave it as it was; making one runs its model five times."""
    return float64_policy(model_dir)


@cache
def _loaded(model_dir: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    return in_float64(model)


def made_up_groups(
    seed: int, *, reward: float | None = None, lengths: int | None = None
) -> list[RolloutGroup]:
    """Three groups of unequal sizes, lengths, ages and temperatures; rewards in [0, 1].

    Args:
        lengths: a seed of their own for the lengths, which others may share.
    """
    random = np.random.default_rng(seed)
    of_lengths = random if lengths is None else np.random.default_rng(lengths)
    groups = []
    for number, (size, version) in enumerate([(4, 3), (2, 1), (5, 2)]):
        completions = tuple(
            make_completion(
                n,
                version=version,
                reward=float(random.random()) if reward is None else reward,
                token_ids=random.integers(0, 42, n).astype(np.int32),
                behaviour_logprob=-random.exponential(3.0, n).astype(np.float32),
            )
            for n in of_lengths.integers(1, 9, size)
        )
        prompt = random.integers(0, 42, of_lengths.integers(1, 6)).astype(np.int32)
        sampling = replace(SAMPLING, temperature=1.0 + 0.5 * number)
        groups.append(
            make_group(str(number), completions=completions, prompt_token_ids=prompt, sampling=sampling)
        )
    return groups


def groups_with_replies(seed: int) -> list[RolloutGroup]:
    """The same groups, some of whose tokens, never the first or the last of a completion, were not drawn."""
    random = np.random.default_rng(seed)

    def replied(completion: Completion) -> Completion:
        is_drawn = random.random(len(completion.token_ids)) < 0.5
        is_drawn[[0, -1]] = True
        return with_replies(completion, is_drawn.tolist())

    return [
        replace(group, completions=tuple(map(replied, group.completions))) for group in made_up_groups(seed)
    ]


def nearby(groups: Sequence[RolloutGroup], policy: Policy, *, spread: float = 0.3) -> list[RolloutGroup]:
    """Return the groups as a sampler whose policy is ``spread`` nats a token from ``policy`` would have."""
    random = np.random.default_rng(0)

    def resampled(group: RolloutGroup, completion: Completion) -> Completion:
        with torch.no_grad():
            logprob = completion_logprob(
                policy, group.prompt_token_ids, completion.token_ids, temperature=group.sampling.temperature
            ).numpy()
        behaviour = np.minimum(0, logprob + random.normal(0, spread, len(logprob)))
        return replace(completion, behaviour_logprob=behaviour.astype(np.float32))

    return [
        replace(group, completions=tuple(resampled(group, one) for one in group.completions))
        for group in groups
    ]


def completion_logprob(
    policy: Policy, prompt: NDArray[np.int32], token_ids: NDArray[np.int32], *, temperature: float
) -> Tensor:
    """Return the logprob of each token of one completion, alone in its batch."""
    tokens = torch.tensor(np.concatenate([prompt, token_ids])).long()
    logprobs: Tensor = policy.scorer(
        tokens[None, :-1],
        torch.arange(len(prompt) - 1, len(tokens) - 1),
        tokens[len(prompt) :],
        torch.full((len(token_ids),), temperature, dtype=torch.float64),
    )
    return logprobs


def gradient_of(
    policy: Policy, groups: Sequence[RolloutGroup], settings: StepSettings
) -> tuple[Tensor, StepOutcome]:
    """Return the gradient a step applied, read off plain gradient descent with rate 1; take the step back."""
    parameters = list(policy.parameters.values())
    kept = [parameter.detach().clone() for parameter in parameters]
    outcome = train_step(
        policy, torch.optim.SGD(parameters, lr=1.0), groups, version=VERSION, settings=settings
    )
    gradient = torch.cat([(was - now.detach()).flatten() for was, now in zip(kept, parameters, strict=True)])
    with torch.no_grad():
        for parameter, was in zip(parameters, kept, strict=True):
            parameter.copy_(was)
    return gradient, outcome
