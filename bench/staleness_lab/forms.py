"""Forms of the default objective: with parts of its predecessor put back, and with each of its own parts out.

    limit h_i = min(max(sqrt(2 d_i), 0.03), most_nats)       d_i: drift supposed at the age, or measured
    weight    min(1, p/q) of each token, to the power f_i     f_i: 1, or 1 - exp(-K_i / 2)
    loss      GRPO's advantage times the weight; 0 for a completion whose mean log ratio is beyond h_i the way
              it is pushed

The predecessor (version 0.3) measured d, let f grow with the completion's divergence K, and multiplied p/q
by GEPO's q_i / E.
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome, mean_of_token_means
from learner.objective.formulas.advantage import centred_advantage, standardised_advantage
from learner.objective.formulas.divergence import kl_behaviour_learner
from learner.objective.formulas.importance import log_group_expectation, trust_by_divergence
from learner.objective.options import Options

_SUPPOSED_NATS_PER_VERSION: Final = 4.5e-4
"""A random walk of log p/q whose steps have a standard deviation of 0.03."""

_LEAST_MOVE_NATS: Final = 0.03
_HELD_NATS: Final = 2.0
_RECORD_TOKENS: Final = 2.0
_SCALE_NATS: Final = 2.0


@dataclass(frozen=True, eq=False)
class RecordedBatch(ObjectiveBatch):
    """A batch with what a learner has measured of the divergence of tokens of its ages."""

    recorded_nats: Tensor | None = None
    """[n, t], >= 0, nats. None: nothing yet; then it is supposed."""


class FormOptions(Options):
    """Which parts there are."""

    measures: bool = False
    """Whether d is what groups of the steps before showed at the age, not what is supposed of it."""

    fades: bool = False
    """Whether weights come in with the divergence of the completion."""

    shares: bool = False
    """Whether p/q is multiplied by q_i / E."""

    weighs: Literal["tokens", "completions", "failures", "nothing"] = "tokens"
    """Bearers of weights below 1: every token; completions, by their mean log ratio; tokens of failures;
    nothing."""

    most_nats: float = Field(default=0.5, gt=0)
    """Upper bound of h; inf with ``least_nats`` leaves nothing alone."""

    least_nats: float = Field(default=_LEAST_MOVE_NATS, gt=0)
    """Lower bound of h."""


def form(batch: ObjectiveBatch, options: FormOptions) -> ObjectiveOutcome:
    """Return the loss of one form."""
    return _form(batch, options, standardised_advantage(batch.reward, batch.groups))


def undivided(batch: ObjectiveBatch, options: FormOptions) -> ObjectiveOutcome:
    """Return the loss of one form, the advantage not divided by the deviation of the group's rewards.

    Source of the advantage: Dr. GRPO, arXiv:2503.20783, section 3.
    """
    return _form(batch, options, centred_advantage(batch.reward, batch.groups))


def _form(batch: ObjectiveBatch, options: FormOptions, advantage: Tensor) -> ObjectiveOutcome:
    log_ratio = batch.log_ratio
    expected = _SUPPOSED_NATS_PER_VERSION * batch.staleness_versions.double()
    if options.measures and isinstance(batch, RecordedBatch) and batch.recorded_nats is not None:
        expected = batch.token_mean(batch.recorded_nats.double())
    limit = torch.sqrt(2 * expected).clamp(min=options.least_nats).clamp(max=options.most_nats)
    weight = _weight(batch, advantage, expected, options)
    held = batch.token_mean(log_ratio.detach().double().clamp(-_HELD_NATS, _HELD_NATS))
    is_over = (((advantage > 0) & (held > limit)) | ((advantage < 0) & (held < -limit)))[:, None]
    weight = torch.where(is_over, 0.0, weight)
    now = torch.exp(batch.within(batch.learner_logprob - batch.learner_logprob.detach()))
    loss = -weight * advantage.to(weight.dtype)[:, None] * now
    return ObjectiveOutcome(mean_of_token_means(loss, batch), weight, is_over & batch.mask)


def _weight(batch: ObjectiveBatch, advantage: Tensor, expected: Tensor, options: FormOptions) -> Tensor:
    """Return [n, t], in (0, 1]."""
    log_ratio = batch.log_ratio.detach()
    above = log_ratio
    if options.shares:
        behaviour = batch.behaviour_mean
        log_share = behaviour - log_group_expectation(behaviour, batch.groups)
        above = above + log_share.to(log_ratio.dtype)[:, None]
    below = above.clamp(max=0)
    if options.fades:
        k3 = batch.within(kl_behaviour_learner(log_ratio, torch.zeros_like(log_ratio))).double().sum(1)
        own = batch.lengths.double() / (batch.lengths.double() + _RECORD_TOKENS)
        divergence = own * k3 + (1 - own) * expected * batch.lengths
        below = below * trust_by_divergence(divergence, scale_nats=_SCALE_NATS).to(below.dtype)[:, None]
    if options.weighs == "completions":
        below = batch.token_mean(log_ratio).clamp(max=0)[:, None].expand_as(log_ratio)
    if options.weighs == "failures":
        below = torch.where((advantage < 0)[:, None], below, 0.0)
    if options.weighs == "nothing":
        below = torch.zeros_like(below)
    return below.exp()


form.is_separable = True  # type: ignore[attr-defined]
undivided.is_separable = True  # type: ignore[attr-defined]
