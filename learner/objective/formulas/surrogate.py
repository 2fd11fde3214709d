"""The loss of a completion or token, given its weight and its advantage.

Weights and logprobs are [n] or [n, t] and carry the gradient; advantages are [n], data, spread over tokens
where needed. Losses are shaped like weights.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from learner.objective.formulas.log_ratio import bounded_ratio, check_precision


class Surrogate(NamedTuple):
    """A loss for each completion or token, and where it is clipped."""

    loss: Tensor
    is_clipped: Tensor
    """bool; where True the loss has no gradient."""


def clipped_surrogate(
    weight: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = math.inf
) -> Surrogate:
    """Return -min(w A, clip(w, 1 - low, 1 + high) A).

    Good completions or tokens are pushed up until their weight is above 1 + high, bad ones down until it is
    below 1 - low. Outside the clip the gradient is -A w grad log p. With a dual clip c the loss of a bad one
    is at most -c A: without it the loss grows with the weight, and one token can be the whole gradient.

    Raises:
        ValueError: the shapes do not fit, a clip is out of range, or weights are narrower than float32.

    Source: PPO, arXiv:1707.06347, eq. 7; per completion as in arXiv:2508.17850; dual clip: arXiv:1912.09729.
    """
    if not (0 < clip_low <= 1 and clip_high > 0 and dual_clip > 1):
        raise ValueError(
            f"clip_low is {clip_low}, allowed is (0, 1]; clip_high is {clip_high}, allowed is > 0; "
            f"dual_clip is {dual_clip}, allowed is > 1"
        )
    check_precision("the weight", weight)
    advantage = _spread_over_tokens(advantage, like=weight)
    is_good, is_bad = advantage > 0, advantage < 0
    gain = torch.minimum(weight * advantage, weight.clamp(1 - clip_low, 1 + clip_high) * advantage)
    is_clipped = ((weight > 1 + clip_high) & is_good) | ((weight < 1 - clip_low) & is_bad)
    if dual_clip < math.inf:
        gain = torch.where(is_bad, torch.maximum(gain, dual_clip * advantage), gain)
        is_clipped = is_clipped | ((weight > dual_clip) & is_bad)
    return Surrogate(-gain, is_clipped)


def decoupled_surrogate(
    learner_logprob: Tensor,
    proximal_logprob: Tensor,
    behaviour_logprob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> Surrogate:
    """Return -(prox/q) min(u A, clip(u, 1 - low, 1 + high) A), u = p/prox, from logprobs in nats.

    The clip is around a recent policy; prox/q, data, is whole, and the dual clip is on u.

    Source: AReaL, arXiv:2505.24298, eq. 5.
    """
    proximal = proximal_logprob.detach()
    ratio = bounded_ratio(learner_logprob - proximal)
    surrogate = clipped_surrogate(
        ratio, advantage, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    factor = bounded_ratio(proximal - behaviour_logprob.detach())
    return Surrogate(factor * surrogate.loss, surrogate.is_clipped)


def soft_gated_surrogate(
    weight: Tensor, advantage: Tensor, *, rate_good: float, rate_bad: float
) -> Surrogate:
    """Return -(4 / tau) sigmoid(tau (w - 1)) A, tau = rate_good where A > 0, else rate_bad; clips nothing.

    The gradient is -A w grad log p at w = 1, and fades as sech^2(tau (w - 1) / 2) on both sides of it.

    Source: SAPO, arXiv:2511.20347, eq. 5-6.
    """
    advantage = _spread_over_tokens(advantage, like=weight)
    rate = weight.new_tensor([rate_bad, rate_good])[(advantage > 0).long()]
    loss = -4 / rate * torch.sigmoid(rate * (weight - 1)) * advantage
    return Surrogate(loss, torch.zeros_like(weight, dtype=torch.bool))


def likelihood_loss(learner_logprob: Tensor, weight: Tensor, advantage: Tensor) -> Tensor:
    """Return -w A log p, whose gradient is -w A grad log p whatever p is; weights are data, [n, 1] too."""
    return -weight.detach() * _spread_over_tokens(advantage, like=learner_logprob) * learner_logprob


def _spread_over_tokens(per_completion: Tensor, *, like: Tensor) -> Tensor:
    if per_completion.shape != like.shape[:1]:
        raise ValueError(f"weight has shape {tuple(like.shape)}, advantage {tuple(per_completion.shape)}")
    return per_completion.detach().to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))
