"""The input and output of every objective: completions as padded rows, and one loss.

An objective is a function ``(batch, options) -> ObjectiveOutcome``. Gradients flow through
``learner_logprob`` alone; everything else is data.

``mean_*`` reduce a loss per completion or token to one loss per batch. Their divisors count the original mask
and all completions, whatever was clipped, masked or discounted away: a batch with less to say makes a smaller
step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from learner.objective.formulas.log_ratio import check_precision
from learner.objective.groups import Groups


@dataclass(frozen=True, eq=False)
class ObjectiveBatch:
    """All completions of a step: n rows of t tokens, groups whole, in any order, padded anywhere.

    Values outside ``mask`` may be anything, also NaN, and change nothing. Whatever does not depend on learner
    logprobs is cached, because a step may evaluate its objective often.
    """

    learner_logprob: Tensor
    """[n, t], nats, float32 or float64; carries the gradient."""
    behaviour_logprob: Tensor
    """[n, t], nats, as recorded when the tokens were drawn."""
    mask: Tensor
    """[n, t], bool: which positions are tokens of the completion; at least one a row."""
    group_index: Tensor
    """[n], integers: equal for completions of one prompt."""
    reward: Tensor
    """[n]"""
    staleness_versions: Tensor
    """[n], >= 0: learner version minus the version each completion is counted from."""
    max_tokens: int
    """Longest completion the sampler may write; >= t."""
    discount: Tensor | None = None
    """[n], >= 0: the outer factor on each completion. None: all count in full."""
    proximal_logprob: Tensor | None = None
    """[n, t], nats: the learner at the start of this batch. None: the learner has not moved since."""
    reference_logprob: Tensor | None = None
    """[n, t], nats, data: under the base model. None: no objective is tied to it."""

    def __post_init__(self) -> None:
        """Check shapes and types.

        Raises:
            ValueError: they do not fit together, a row has no token, or logprobs are narrower than float32.
        """
        rows, tokens = self.learner_logprob.shape[0], tuple(self.learner_logprob.shape)
        shapes = {
            "behaviour_logprob": (self.behaviour_logprob, tokens),
            "mask": (self.mask, tokens),
            "group_index": (self.group_index, (rows,)),
            "reward": (self.reward, (rows,)),
            "staleness_versions": (self.staleness_versions, (rows,)),
            "discount": (self.discount, (rows,)),
            "proximal_logprob": (self.proximal_logprob, tokens),
            "reference_logprob": (self.reference_logprob, tokens),
        }
        for name, (tensor, shape) in shapes.items():
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, learner_logprob asks for {shape}")
        for name in ("learner_logprob", "behaviour_logprob", "proximal_logprob", "reference_logprob"):
            logprob: Tensor | None = getattr(self, name)
            if logprob is not None:
                check_precision(name, logprob)
        if len(tokens) != 2 or rows == 0:
            raise ValueError(f"learner_logprob has shape {tokens}; a batch has a row and two axes")
        if not bool(self.mask.any(dim=1).all()):
            raise ValueError("a completion without tokens has no likelihood")

    @cached_property
    def groups(self) -> Groups:
        """The completions by prompt."""
        return Groups.of(self.group_index)

    @property
    def lengths(self) -> Tensor:
        """[n], tokens of each completion, in the type of ``learner_logprob``."""
        return self._tokens.to(self.learner_logprob.dtype)

    @property
    def log_ratio(self) -> Tensor:
        """[n, t], log p/q of each token, 0 outside the mask; carries the gradient."""
        behaviour = self.behaviour_logprob.detach().to(self.learner_logprob.dtype)
        return self.within(self.learner_logprob - behaviour)

    @property
    def proximal(self) -> Tensor:
        """[n, t], nats, without gradient: the learner as it is now where ``proximal_logprob`` is None."""
        known = self.learner_logprob if self.proximal_logprob is None else self.proximal_logprob
        return known.detach().to(self.learner_logprob.dtype)

    @property
    def learner_mean(self) -> Tensor:
        """[n], mean token log-probability under the learner; carries the gradient."""
        return self.token_mean(self.learner_logprob)

    @cached_property
    def behaviour_mean(self) -> Tensor:
        """[n], mean token log-probability under the behaviour policy, float64, for group expectations."""
        return self.token_mean(self.behaviour_logprob.detach().double())

    def within(self, values: Tensor) -> Tensor:
        """Return [n, t] with 0 outside the mask."""
        return torch.where(self.mask, values, 0.0)

    def token_mean(self, values: Tensor) -> Tensor:
        """Return each completion's mean over its tokens: [n] from [n, t]."""
        return self.within(values).sum(dim=1) / self._tokens

    def counted(self, values: Tensor) -> Tensor:
        """Multiply [n] or [n, t] by the outer factor."""
        if self.discount is None:
            return values
        discount = self.discount.detach().to(values.dtype)
        return values * (discount if values.ndim == 1 else discount[:, None])

    @cached_property
    def _tokens(self) -> Tensor:
        return self.mask.sum(dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectiveOutcome:
    """A loss and its parts."""

    loss: Tensor
    """Scalar; carries the gradient."""
    weight: Tensor
    """[n] or [n, t]: the weight of each completion or token; without gradient."""
    is_clipped: Tensor
    """Like ``weight``, bool: where the loss has no gradient on purpose; False outside the mask."""
    is_truncated: Tensor | None = None
    """[n, t], bool: tokens whose weight was cut to the objective's ceiling, clipped ones excepted.
    None: the objective truncates nothing."""
    taught: Tensor | None = None
    """Scalar: the part of ``loss`` that depends on rewards; the rest pulls towards the behaviour policy.
    None: all of it."""
    beside_weight: Tensor | None = None
    """Scalar, without gradient: factor on the loss of what is trained beside the policy. None: 1."""


ObjectiveFunction = Callable[[ObjectiveBatch, Any], ObjectiveOutcome]
"""The second argument is the objective's own options, see ``registry``."""


def mean_over_groups(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return the mean over groups of the mean of [n] over their completions."""
    groups = batch.groups
    share = batch.counted(1 / (groups.spread(groups.size(loss.detach().double())) * groups.count))
    return (share.to(loss.dtype) * loss).sum()


def mean_over_completions(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return the mean of [n] over all completions."""
    return batch.counted(loss).sum() / len(loss)


def mean_of_token_means(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return the mean over completions of the mean of [n, t] over their tokens.

    A token of a long completion counts less than one of a short completion.

    Source: GRPO, arXiv:2402.03300, eq. 3.
    """
    return mean_over_completions(batch.token_mean(loss), batch)


def mean_over_tokens(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return the mean of [n, t] over all tokens of the batch.

    Source: DAPO, arXiv:2503.14476, section 3.3.
    """
    return batch.counted(batch.within(loss)).sum() / batch.mask.sum()


def mean_over_budget(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return the sum of [n, t] over n * max_tokens: no completion's length changes its weight.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.
    """
    return batch.counted(batch.within(loss)).sum() / (len(loss) * batch.max_tokens)


def mean_over_kept_tokens(loss: Tensor, batch: ObjectiveBatch, *, keep: Tensor) -> Tensor:
    """Return the mean of [n, t] over the tokens of the completions to keep, [n], bool; 0 if there are none.

    Source: DAPO's dynamic sampling, arXiv:2503.14476, section 3.2: what is not kept was never in the batch.
    """
    mask = batch.mask & keep[:, None]
    return batch.counted(torch.where(mask, loss, 0.0)).sum() / mask.sum().clamp(min=1)
