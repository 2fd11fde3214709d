"""The loss of a completion or token, given its weight and its advantage."""

from typing import NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    """A loss for each completion or token, and where it is clipped."""

    loss: Tensor
    is_clipped: Tensor
    """bool; where True the loss has no gradient."""


def clipped_surrogate(weight: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> Surrogate:
    """Give -min(w A, clip(w, 1 - low, 1 + high) A).

    What is good is pushed until its weight is above 1 + high, what is bad until it is below
    1 - low. Outside the clip the gradient is -A w grad log p.

    Args:
        weight: [n] or [n, t], > 0, carries the gradient.
        advantage: [n], data; spread over the tokens where weights are tokens'.
        clip_low: in (0, 1].
        clip_high: > 0.

    Returns:
        Loss and clip mask, shaped like ``weight``.

    Raises:
        ValueError: the shapes do not fit, or a clip is out of range.

    Source: PPO, arXiv:1707.06347, eq. 7; per completion as in arXiv:2508.17850.
    """
    if not (0 < clip_low <= 1 and clip_high > 0):
        raise ValueError(
            f"clip_low is {clip_low}, allowed is (0, 1]; clip_high is {clip_high}, allowed is > 0"
        )
    advantage = _spread_over_tokens(advantage, like=weight)
    loss = -torch.minimum(weight * advantage, weight.clamp(1 - clip_low, 1 + clip_high) * advantage)
    too_high = (weight > 1 + clip_high) & (advantage > 0)
    too_low = (weight < 1 - clip_low) & (advantage < 0)
    return Surrogate(loss, too_high | too_low)


def decoupled_surrogate(
    learner_logprob: Tensor,
    proximal_logprob: Tensor,
    behaviour_logprob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Give -(prox/q) min(u A, clip(u, 1 - low, 1 + high) A), u = p/prox.

    The clip is around a recent policy, and prox/q, data, is whole.

    Args:
        learner_logprob: [n] or [n, t], nats; carries the gradient.
        proximal_logprob: shaped alike, nats, data.
        behaviour_logprob: shaped alike, nats, data.
        advantage: [n], data.
        clip_low: in (0, 1].
        clip_high: > 0.

    Returns:
        Loss and clip mask, shaped like ``learner_logprob``.

    Source: AReaL, arXiv:2505.24298, eq. 5.
    """
    proximal = proximal_logprob.detach()
    ratio = torch.exp(learner_logprob - proximal)
    surrogate = clipped_surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    return Surrogate(torch.exp(proximal - behaviour_logprob.detach()) * surrogate.loss, surrogate.is_clipped)


def likelihood_loss(learner_logprob: Tensor, weight: Tensor, advantage: Tensor) -> Tensor:
    """Give -w A log p, whose gradient is -w A grad log p whatever p is.

    Args:
        learner_logprob: [n] or [n, t], nats; carries the gradient.
        weight: of the same shape or [n, 1], data.
        advantage: [n], data; spread over the tokens where logprobs are tokens'.

    Returns:
        Shaped like ``learner_logprob``.
    """
    return -weight.detach() * _spread_over_tokens(advantage, like=learner_logprob) * learner_logprob


def _spread_over_tokens(per_completion: Tensor, *, like: Tensor) -> Tensor:
    if per_completion.shape != like.shape[:1]:
        raise ValueError(f"weight has shape {tuple(like.shape)}, advantage {tuple(per_completion.shape)}")
    return per_completion.detach().to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))
