"""One gradient step: groups in, new parameters and the numbers that describe the step out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.model import Policy
from learner.objective.divergence import effective_sample_size_ratio, kl_behaviour_learner
from learner.objective.importance import expectation_weight
from learner.objective.surrogate import clipped_surrogate
from learner.packing import MicroBatch, collate, micro_batches, rows_of
from node.rollout import RolloutGroup


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What shapes a step; fields as in LearnerConfig."""

    clip_epsilon: float
    kl_coefficient: float
    gradient_clip_norm: float
    staleness_half_life_versions: float
    micro_batch_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step was like, measured before the parameters moved."""

    is_applied: bool
    """False: loss or gradient was not finite, and the parameters are as before."""
    loss: float
    gradient_norm: float
    """Before clipping."""
    kl_nats: float
    """KL(behaviour || learner), mean over tokens."""
    ess_ratio: float
    clip_fraction: float
    surprisal_nats: float
    """Minus the learner logprob, mean over tokens."""
    tokens: int
    """Completion tokens."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """One micro-batch; sums over tokens, tensors over rows."""

    loss: Tensor
    weight: Tensor
    is_clipped: Tensor
    kl_nats_sum: Tensor
    surprisal_nats_sum: Tensor
    tokens: int


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[RolloutGroup],
    *,
    version: int,
    settings: StepSettings,
) -> StepOutcome:
    """Move the parameters one step down the GEPO loss of ``groups``.

    Args:
        policy: Changed in place, unless the outcome says it was not applied.
        optimizer: Over ``policy.parameters``.
        groups: Admitted, whole, at least one.
        version: Learner version before the step.
        settings: See StepSettings.
    """
    optimizer.zero_grad(set_to_none=True)
    rows = rows_of(groups, version=version, half_life_versions=settings.staleness_half_life_versions)
    parameters = list(policy.parameters.values())
    measured = []
    for part in micro_batches(rows, budget_tokens=settings.micro_batch_tokens):
        batch = collate(part, dtype=parameters[0].dtype, device=policy.device)
        one = _measure(policy, batch, settings)
        one.loss.backward()  # type: ignore[no-untyped-call]
        measured.append(one)
    gradient_norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.gradient_clip_norm))
    loss = float(sum(one.loss.detach() for one in measured))
    is_applied = math.isfinite(loss) and math.isfinite(gradient_norm)
    if is_applied:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return _outcome(measured, is_applied=is_applied, loss=loss, gradient_norm=gradient_norm)


def _measure(policy: Policy, batch: MicroBatch, settings: StepSettings) -> _Measured:
    mask = batch.is_completion
    logprob = policy.token_logprobs(batch.input_ids, batch.target_ids, batch.temperature)
    logprob = torch.where(mask, logprob, 0.0)
    lengths = mask.sum(dim=1)
    weight = expectation_weight(logprob.sum(dim=1) / lengths, batch.log_expectation)
    surrogate = clipped_surrogate(weight, batch.advantage, clip_epsilon=settings.clip_epsilon)
    kl = kl_behaviour_learner(logprob, batch.behaviour_logprob)
    penalty = settings.kl_coefficient * kl.sum(dim=1) / lengths
    return _Measured(
        loss=(batch.share * (surrogate.loss + penalty)).sum(),
        weight=weight.detach(),
        is_clipped=surrogate.is_clipped,
        kl_nats_sum=kl.detach().sum(),
        surprisal_nats_sum=-logprob.detach().sum(),
        tokens=int(lengths.sum()),
    )


def _outcome(
    measured: Sequence[_Measured], *, is_applied: bool, loss: float, gradient_norm: float
) -> StepOutcome:
    tokens = sum(one.tokens for one in measured)
    weight = torch.cat([one.weight for one in measured])
    return StepOutcome(
        is_applied=is_applied,
        loss=loss,
        gradient_norm=gradient_norm,
        kl_nats=float(sum(one.kl_nats_sum for one in measured)) / tokens,
        ess_ratio=effective_sample_size_ratio(weight) if bool(weight.isfinite().all()) else math.nan,
        clip_fraction=float(torch.cat([one.is_clipped for one in measured]).float().mean()),
        surprisal_nats=float(sum(one.surprisal_nats_sum for one in measured)) / tokens,
        tokens=tokens,
    )
