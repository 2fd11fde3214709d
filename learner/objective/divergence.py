"""How far the learner has moved from the policy that sampled."""

import torch
from torch import Tensor


def kl_behaviour_learner(learner_logprob: Tensor, behaviour_logprob: Tensor) -> Tensor:
    """Estimate KL(q || p) token by token, from tokens drawn from q.

    k3 = exp(lp - lq) - (lp - lq) - 1, unbiased, >= 0, smaller variance than lq - lp. The same
    expression with p and q exchanged estimates chi^2(q || p) - KL from these samples, and explodes.

    Args:
        learner_logprob: [...], nats.
        behaviour_logprob: [...], nats, data.

    Returns:
        [...], nats; carries the gradient of ``learner_logprob``.

    Raises:
        ValueError: the shapes differ.

    Source: http://joschu.net/blog/kl-approx.html.
    """
    if learner_logprob.shape != behaviour_logprob.shape:
        raise ValueError(
            f"learner_logprob has shape {tuple(learner_logprob.shape)}, "
            f"behaviour_logprob {tuple(behaviour_logprob.shape)}"
        )
    log_ratio = learner_logprob - behaviour_logprob.detach()
    return torch.expm1(log_ratio) - log_ratio


def effective_sample_size_ratio(weight: Tensor) -> float:
    """Give (sum w)^2 / (n sum w^2): the share of the completions that the weights leave in effect.

    Args:
        weight: [n], >= 0, at least one > 0.

    Returns:
        In [1/n, 1]; 1 when all weights are equal.

    Raises:
        ValueError: there are no weights, or all are 0.

    Source: Kish, Survey Sampling (1965), section 11.2.
    """
    largest = weight.detach().double().max() if weight.numel() else torch.tensor(0.0)
    if not largest > 0:
        raise ValueError("the effective sample size needs at least one weight above 0")
    scaled = weight.detach().double() / largest
    return float(scaled.sum() ** 2 / (scaled.numel() * (scaled**2).sum()))
