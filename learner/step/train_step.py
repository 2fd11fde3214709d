"""One gradient step: groups to a loss, its gradient, clipped, to new parameters, and the step's numbers."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.model.micro_batches import MicroBatch, collate, objective_batch
from learner.model.model import Policy, ScoringModel
from learner.model.rank_exchanges import Ranks
from learner.objective.batch import ObjectiveBatch
from learner.objective.formulas.age_discounts import sequence_learning_rate_factor
from learner.objective.formulas.divergence import effective_sample_size_ratio
from learner.objective.formulas.log_ratio import is_beyond_bound
from learner.objective.slow_fast import slow_fast_step
from learner.step.optimizer import rate_share
from learner.step.step_loss import LossOutcome, StepLoss, add_gradient, group_discount, logprobs_of
from learner.step_numbers import BatchFigures, StepNumbers
from learner.step_settings import StepSettings
from node.values.groups.rollout import RolloutGroup


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step."""

    is_finite: bool
    """Whether loss and gradient are; if not, nothing is changed."""
    loss: float
    kl_nats_of_groups: tuple[float, ...]
    """KL(behaviour || learner) of each group, in order, mean over its tokens."""
    numbers: StepNumbers

    @property
    def is_applied(self) -> bool:
        """Whether the step was taken."""
        return self.is_finite and self.numbers.teaching_groups > 0


class _NotTakenError(Exception):
    """The first of several steps teaches nothing, or one of them is not finite."""


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[RolloutGroup],
    *,
    version: int,
    settings: StepSettings,
    reference: ScoringModel | None = None,
) -> StepOutcome:
    """Move the parameters one step down the loss of ``groups``, if any of them teaches something.

    Policy and optimizer change in place, unless the outcome says otherwise; no gradients are left behind.

    Args:
        groups: admitted, whole, at least one.
        version: of the learner before the step.
        reference: the base model, for the penalty towards it; None: no such penalty.
    Raises:
        StartupError: the objective cannot be loaded.
    """
    dtype, device = next(iter(policy.parameters.values())).dtype, policy.device
    batch = objective_batch(
        groups,
        version=version,
        discount=group_discount(settings),
        dtype=dtype,
        device=device,
    )
    rows = policy.scorer.step_rows(groups, packing=settings.packing)
    shares = policy.ranks.share_out(rows, budget_tokens=settings.micro_batch_tokens)
    parts = [
        collate(groups, part, width=batch.mask.shape[1], dtype=dtype, device=device, packed=rows.is_packed)
        for part in shares[policy.ranks.share]
    ]
    if reference is not None:
        batch = replace(batch, reference_logprob=logprobs_of(reference, parts, batch))
    take = _take_slow_fast_step if settings.fast_steps else _take_step
    figures = BatchFigures.of(groups, version=version)
    outcome = take(policy, optimizer, parts, batch, settings, version=version, figures=figures)
    read = sum(rows.tokens_read(part) for share in shares for part in share)
    numbers = replace(outcome.numbers, read_tokens=read, distinct_tokens=rows.distinct_tokens)
    return replace(outcome, numbers=numbers)


def _take_slow_fast_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[MicroBatch],
    batch: ObjectiveBatch,
    settings: StepSettings,
    *,
    version: int,
    figures: BatchFigures,
) -> StepOutcome:
    parameters = policy.local_parameters()
    parameters_before = [parameter.detach().clone() for parameter in parameters]
    optimizer_before = copy.deepcopy(optimizer.state_dict())
    outcomes: list[StepOutcome] = []

    def step() -> None:
        nonlocal batch
        outcomes.append(
            _take_step(policy, optimizer, parts, batch, settings, version=version, figures=figures)
        )
        if not (outcomes[0].is_applied and outcomes[-1].is_finite):
            raise _NotTakenError
        if batch.proximal_logprob is None:
            batch = replace(batch, proximal_logprob=batch.learner_logprob.detach().clone())

    try:
        slow_fast_step(
            parameters, step, fast_steps=settings.fast_steps, reposition_share=settings.reposition_share
        )
    except _NotTakenError:
        if outcomes[0].is_applied:
            with torch.no_grad():
                for parameter, before in zip(parameters, parameters_before, strict=True):
                    parameter.copy_(before)
            optimizer.load_state_dict(optimizer_before)
    return replace(outcomes[0], is_finite=outcomes[-1].is_finite)


def _take_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[MicroBatch],
    batch: ObjectiveBatch,
    settings: StepSettings,
    *,
    version: int,
    figures: BatchFigures,
) -> StepOutcome:
    """Make one optimizer step, if the batch teaches something; leave the logprobs it saw in the batch."""
    measured = add_gradient(policy, parts, batch, StepLoss.of(settings))
    policy.differentiate_beside(parts, weight=measured.objective.beside_weight)
    parameters = list(policy.parameters.values())
    gradient_norm = policy.ranks.gradient_norm(parameters)
    outcome = _outcome(batch, measured, figures, gradient_norm=gradient_norm, ranks=policy.ranks)
    if outcome.is_applied:
        if outcome.numbers.gradient_norm > settings.gradient_clip_norm:
            _clip(policy, to=settings.gradient_clip_norm, norm=gradient_norm)
        factor = rate_share(settings, version)
        if settings.scales_rate_by_sample_size:
            factor *= sequence_learning_rate_factor(batch.log_ratio.sum(dim=1))
        with _scaled_rate(optimizer, factor=factor) as learning_rate:
            optimizer.step()
        policy.scorer.step_taken(parts)
        outcome = replace(outcome, numbers=replace(outcome.numbers, learning_rate=learning_rate))
    optimizer.zero_grad(set_to_none=True)
    return outcome


@torch.no_grad()
def _clip(policy: Policy, *, to: float, norm: Tensor) -> None:
    """Scale the gradient down, in place, as torch's clip_grads_with_norm_ does, on this rank's part."""
    parts = [policy.ranks.local(p.grad) for p in policy.parameters.values() if p.grad is not None]
    torch._foreach_mul_(parts, torch.clamp(to / (norm + 1e-6), max=1.0).to(parts[0].device))


@contextmanager
def _scaled_rate(optimizer: torch.optim.Optimizer, *, factor: float) -> Iterator[float]:
    """Scale the learning rate within the body; yield it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    try:
        yield optimizer.param_groups[0]["lr"]
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


@torch.no_grad()
def _outcome(
    batch: ObjectiveBatch,
    measured: LossOutcome,
    figures: BatchFigures,
    *,
    gradient_norm: Tensor,
    ranks: Ranks,
) -> StepOutcome:
    groups, objective, kl = batch.groups, measured.objective, measured.kl_nats
    teaching = measured.loss.new_zeros(()) if measured.teaches is None else measured.teaches.sum()
    surprisal = -batch.within(batch.learner_logprob).sum()
    is_clamped = is_beyond_bound(batch.log_ratio)
    counts = [objective.is_clipped.sum(), is_clamped.sum(), _sum(objective.is_truncated, batch)]
    counts += [_sum(measured.reference_kl_nats, batch), teaching]
    norm_there = gradient_norm.to(measured.loss.device)
    sums = torch.stack([measured.loss, norm_there, kl.sum(), surprisal, *counts])
    kl_of_groups = groups.sum(kl.sum(dim=1)) / groups.sum(batch.lengths)
    weight = objective.weight if objective.weight.ndim == 1 else batch.token_mean(objective.weight)
    # One copy for all numbers: each copy waits for the device.
    exact = [sums.double(), batch.mask.sum()[None].double(), kl_of_groups.double(), weight.double()]
    numbers = ranks.agreed(torch.cat(exact)).cpu()
    loss, norm, kl_nats, surprise, clipped, clamped, truncated, reference_kl, taught = numbers[
        : len(sums)
    ].tolist()
    tokens, *of_groups = numbers[len(sums) : -len(weight)].tolist()
    weight = numbers[-len(weight) :]
    return StepOutcome(
        is_finite=math.isfinite(loss) and math.isfinite(norm),
        loss=loss,
        kl_nats_of_groups=tuple(of_groups),
        numbers=StepNumbers(
            batch=figures,
            teaching_groups=int(taught),
            tokens=int(tokens),
            gradient_norm=norm,
            learning_rate=0.0,  # until the step is taken
            kl_nats=kl_nats / tokens,
            reference_kl_nats=None if measured.reference_kl_nats is None else reference_kl / tokens,
            surprisal_nats=surprise / tokens,
            ess_ratio=_sample_size_ratio(weight),
            clip_fraction=clipped / (tokens if objective.is_clipped.ndim == 2 else len(weight)),
            truncated_fraction=None if objective.is_truncated is None else truncated / tokens,
            clamped_tokens=int(clamped),
        ),
    )


def _sum(values: Tensor | None, batch: ObjectiveBatch) -> Tensor:
    """Return the sum of what an objective tells of its tokens or completions; 0 where it does not."""
    return batch.learner_logprob.new_zeros(()) if values is None else values.sum()


def _sample_size_ratio(weight: Tensor) -> float:
    return effective_sample_size_ratio(weight) if 0 < float(weight.sum()) < math.inf else math.nan
