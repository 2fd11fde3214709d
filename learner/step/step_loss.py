"""The loss of a step, and its gradient brought to the parameters micro-batch by micro-batch.

    logprobs [n, t] of all completions --objective--> loss --backward--> gradient [n, t]
                  ^                                                          |
          forward, micro-batch by micro-batch               backward, micro-batch by micro-batch

The gradient at the logprobs is that of the whole batch, also for objectives that rank, whiten or
mask over it; how the model's work is cut up, or shared out between ranks, cannot change it. Where every
row's gradient depends on its own logprobs alone, one pass of the model does: the other rows may hold anything
meanwhile. Otherwise the model runs forward twice (GradCache, arXiv:2101.06983).

A group teaches something if the rewards' part of the loss has a gradient at any of its logprobs, which is
exactly 0 where every advantage or weight is. The pull towards the behaviour policy is not counted: it teaches
nothing by itself, and on policy it is rounding noise, which AdamW scales up to a whole step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from learner.model.micro_batches import MicroBatch, objective_batch
from learner.model.model import Policy, ScoringModel
from learner.model.rank_exchanges import Ranks
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome, mean_over_groups
from learner.objective.formulas.age_discounts import polynomial_discount, version_discount
from learner.objective.formulas.divergence import (
    group_sample_size_ratio,
    kl_behaviour_learner,
    kl_learner_reference,
    kl_penalty,
    reference_penalty,
)
from learner.objective.registry import Objective, load_objective
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.values.groups.rollout import RolloutGroup


class LossOutcome(NamedTuple):
    """The loss of a batch and its parts."""

    loss: Tensor
    """Scalar, the penalty included; carries the gradient of the learner's logprobs."""
    objective: ObjectiveOutcome
    kl_nats: Tensor
    """[n, t], estimate of KL(behaviour || learner), 0 outside the mask; without gradient."""
    reference_kl_nats: Tensor | None
    """[n, t], the same of KL(learner || base model); None: the batch has no logprobs of the base model."""
    taught: Tensor
    """Scalar: the part of the loss from rewards and from the penalty towards the base model."""
    teaches: Tensor | None = None
    """[groups], bool: whether any token of the group has a gradient of ``taught``. None: not asked yet."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """An objective, penalties and, if so chosen, a discount by effective sample size."""

    objective: Objective
    kl_coefficient: float
    reference_kl_coefficient: float
    """Counts where the batch has logprobs of the base model."""
    discounts_by_sample_size: bool

    @classmethod
    def of(cls, settings: StepSettings) -> Self:
        """Return the loss that a step with these settings differentiates.

        Raises:
            StartupError: the objective cannot be loaded.
        """
        try:
            objective = load_objective(settings.objective, settings.objective_options)
        except ValueError as error:
            fix = "Correct learner.objective and learner.objective_options."
            raise StartupError(str(error), fix=fix) from error
        return cls(
            objective,
            kl_coefficient=settings.kl_coefficient,
            reference_kl_coefficient=settings.reference_kl_coefficient,
            discounts_by_sample_size=settings.staleness_discount == "sample_size",
        )

    @property
    def is_separable(self) -> bool:
        """Whether a row's gradient depends on no other row's learner logprobs."""
        return self.objective.is_separable and not self.discounts_by_sample_size

    def __call__(self, batch: ObjectiveBatch) -> LossOutcome:
        """Evaluate on a whole batch."""
        if self.discounts_by_sample_size:
            batch = replace(
                batch, discount=group_sample_size_ratio(batch.token_mean(batch.log_ratio), batch.groups)
            )
        outcome = self.objective(batch)
        behaviour = batch.behaviour_logprob.to(batch.learner_logprob.dtype)
        loss = outcome.loss
        taught = loss if outcome.taught is None else outcome.taught
        if self.kl_coefficient > 0:
            penalty = batch.token_mean(
                kl_penalty(batch.within(batch.learner_logprob), batch.within(behaviour))
            )
            loss = loss + self.kl_coefficient * mean_over_groups(penalty, batch)
        kl = batch.within(kl_behaviour_learner(batch.learner_logprob.detach(), behaviour))
        reference_kl = None
        if batch.reference_logprob is not None:
            both = (batch.within(batch.reference_logprob), batch.within(behaviour))
            penalty = batch.token_mean(reference_penalty(batch.within(batch.learner_logprob), *both))
            to_base = self.reference_kl_coefficient * mean_over_groups(penalty, batch)
            loss, taught = loss + to_base, taught + to_base
            reference_kl = kl_learner_reference(batch.within(batch.learner_logprob.detach()), *both)
        return LossOutcome(loss, outcome, kl, reference_kl, taught)


def group_discount(settings: StepSettings) -> Callable[[int], float]:
    """Return the weight of a group by its staleness in versions; 1 where the loss itself discounts."""
    if settings.staleness_discount == "exponential":
        return partial(version_discount, half_life_versions=settings.staleness_half_life_versions)
    if settings.staleness_discount == "polynomial":
        return partial(polynomial_discount, power=settings.staleness_power)
    return lambda staleness_versions: 1.0


def add_gradient(
    policy: Policy, parts: Sequence[MicroBatch], batch: ObjectiveBatch, loss: StepLoss
) -> LossOutcome:
    """Add the gradient of the loss to the policy's; return the loss and which groups teach something.

    ``parts`` are all rows of ``batch``, each once, or this rank's share of them. The batch's
    ``learner_logprob``, a leaf that asks for a gradient, is overwritten with the learner's.
    """
    ranks = policy.ranks
    outcome: LossOutcome | None = None

    def hold(part: MicroBatch, logprob: Tensor) -> None:
        held = batch.learner_logprob.detach().view(-1)
        held[part.places] = logprob.detach().to(held.dtype)

    def weigh(part: MicroBatch, logprob: Tensor) -> Tensor:
        nonlocal outcome
        hold(part, logprob)
        if not loss.is_separable:
            _complete(ranks, batch.learner_logprob, parts)
        gradient, outcome = _differentiate(batch, loss)
        return gradient.view(-1)[part.places].to(logprob.dtype)

    if loss.is_separable or (len(parts) == 1 and not policy.is_pipelined):
        policy.differentiate(parts, weigh)
        if ranks.is_shared and loss.is_separable:
            _complete(ranks, batch.learner_logprob, parts)
            outcome = loss(batch)
        assert outcome is not None  # the last part's: by then all logprobs are in the batch
        return _with_teaching(batch, outcome)
    policy.score(parts, hold)
    _complete(ranks, batch.learner_logprob, parts)
    gradient, outcome = _differentiate(batch, loss)
    policy.differentiate(parts, lambda part, logprob: gradient.view(-1)[part.places].to(logprob.dtype))
    return _with_teaching(batch, outcome)


def teaches_where_drawn(
    groups: Sequence[RolloutGroup], *, version: int, settings: StepSettings
) -> tuple[bool, ...]:
    """Return whether each group of a batch teaches something to the policies that drew it.

    At their logprobs no bound on ratios cuts anything off, and no model is needed. What a pull towards the
    base model would teach is left out.

    Args:
        groups: whole, at least one.
        version: at which the groups are counted as stale.
    """
    batch = objective_batch(
        groups,
        version=version,
        discount=group_discount(settings),
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    teaches = _with_teaching(batch, StepLoss.of(settings)(batch)).teaches
    assert teaches is not None
    return tuple(teaches.tolist())


def logprobs_of(model: ScoringModel, parts: Sequence[MicroBatch], batch: ObjectiveBatch) -> Tensor:
    """Return the logprobs of the batch's tokens under another model: [n, t], 0 outside the mask."""
    logprob = torch.zeros_like(batch.behaviour_logprob)

    def hold(part: MicroBatch, of_part: Tensor) -> None:
        logprob.view(-1)[part.places] = of_part.to(logprob.dtype)

    model.score(parts, hold)
    _complete(model.ranks, logprob, parts)
    return logprob


def _complete(ranks: Ranks, logprob: Tensor, parts: Sequence[MicroBatch]) -> None:
    """Add the logprobs of the rows that other ranks score."""
    if ranks.is_shared:
        ranks.complete(logprob.detach(), torch.cat([part.places for part in parts]))


def _differentiate(batch: ObjectiveBatch, loss: StepLoss) -> tuple[Tensor, LossOutcome]:
    outcome = loss(batch)
    (gradient,) = torch.autograd.grad(outcome.loss, batch.learner_logprob, retain_graph=True)
    return gradient, outcome


def _with_teaching(batch: ObjectiveBatch, outcome: LossOutcome) -> LossOutcome:
    (gradient,) = torch.autograd.grad(outcome.taught, batch.learner_logprob)
    of_rows = ((gradient != 0) & batch.mask).any(dim=1)
    teaches = batch.groups.sum(of_rows.to(gradient.dtype)) > 0
    return outcome._replace(loss=outcome.loss.detach(), taught=outcome.taught.detach(), teaches=teaches)
