"""Divergence of the learner from the policy that sampled, from that policy's samples.

Estimators of divergences have two errors, of value and of gradient. Those here that carry a
gradient have the right expectation of both, for tokens drawn from q. Logprobs are [...], nats, and only the
learner's carry a gradient; shapes that differ are a ValueError.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from learner.objective.formulas.log_ratio import bounded, bounded_ratio
from learner.objective.groups import Groups


def kl_behaviour_learner(learner_logprob: Tensor, behaviour_logprob: Tensor) -> Tensor:
    """Estimate KL(q || p) token by token, from tokens drawn from q.

    k3 = exp(lp - lq) - (lp - lq) - 1, unbiased, >= 0, smaller variance than lq - lp. The same
    expression with p and q exchanged estimates chi^2(q || p) - KL from these samples, and explodes.

    Source: http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = bounded(_log_ratio(learner_logprob, behaviour_logprob))
    return torch.expm1(log_ratio) - log_ratio


def kl_penalty(learner_logprob: Tensor, behaviour_logprob: Tensor) -> Tensor:
    """Return k3 up to p/q = 2 and its tangent beyond: a penalty that no token can make dominate.

    With l = log p/q: e^l - 1 - l where l <= log 2, else 1 - log 2 + (l - log 2). The gradient at lp is
    min(p/q, 2) - 1, within (-1, 1]; that of k3 is p/q - 1, without bound. Value and gradient are those of
    KL(q || p) wherever p <= 2q. Elsewhere the gradient is off by E_p[(1 - 2q/p)+ grad log p] at most, and
    still points back to q. Why no unbiased estimator can do better: README.md in this folder.
    """
    log_ratio = _log_ratio(learner_logprob, behaviour_logprob)
    curved = log_ratio.clamp(max=math.log(2))
    return torch.expm1(curved) - curved + (log_ratio - curved)


def reference_penalty(
    learner_logprob: Tensor, reference_logprob: Tensor, behaviour_logprob: Tensor
) -> Tensor:
    """Return a penalty on log p/reference, >= 0, whose gradient is that of KL(p || reference), and bounded.

    With d = log p/reference: min(p/q, 2) times d^2 / 2 up to |d| = 3, and its tangent beyond. The gradient
    at lp is min(p/q, 2) d, d held within 3 nats: at most 6, and 0 where p is the reference. Its expectation
    is that of KL(p || reference), as E_p[grad log p] = 0, for tokens drawn from q wherever p <= 2q and p is
    within a factor of 20 of the reference. Beyond that factor it is the gradient of another f-divergence,
    f'(p/reference) = d held within 3, which is also least at the reference. The value is no divergence, see
    ``kl_learner_reference`` for that.
    """
    weight = _log_ratio(learner_logprob.detach(), behaviour_logprob).clamp(max=math.log(2)).exp()
    distance = _log_ratio(learner_logprob, reference_logprob)
    return weight * huber_loss(distance, torch.zeros_like(distance), reduction="none", delta=3.0)


def kl_learner_reference(
    learner_logprob: Tensor, reference_logprob: Tensor, behaviour_logprob: Tensor
) -> Tensor:
    """Estimate KL(p || reference) token by token, from tokens drawn from q: (p/q) k3(reference/p).

    Without the factor p/q, as usually written, value and gradient belong to another divergence as
    soon as p is not q. The gradient flows through the factor too.

    Source: DeepSeek-V3.2, arXiv:2512.02556, eq. 7.
    """
    from_learner = bounded(-_log_ratio(learner_logprob, reference_logprob))
    weight = bounded_ratio(_log_ratio(learner_logprob, behaviour_logprob))
    return weight * (torch.expm1(from_learner) - from_learner)


def completion_divergence(learner_logprob: Tensor, behaviour_logprob: Tensor, mask: Tensor) -> Tensor:
    """Return each completion's mean estimate of KL(q || p) over its tokens: [n], >= 0, from [n, t].

    Without gradient. Values outside the mask may be anything.
    """
    kl = torch.where(mask, kl_behaviour_learner(learner_logprob.detach(), behaviour_logprob), 0.0)
    return kl.sum(dim=1) / mask.sum(dim=1)


def effective_sample_size_ratio(weight: Tensor) -> float:
    """Return (sum w)^2 / (n sum w^2), in [1/n, 1]: the share of completions left in effect.

    Raises:
        ValueError: there are no weights, [n], or all are 0.

    Source: Kish, Survey Sampling (1965), section 11.2.
    """
    largest = weight.detach().double().max() if weight.numel() else torch.tensor(0.0)
    if not largest > 0:
        raise ValueError("the effective sample size needs at least one weight above 0")
    scaled = weight.detach().double() / largest
    return float(scaled.sum() ** 2 / (scaled.numel() * (scaled**2).sum()))


def group_sample_size_ratio(log_weight: Tensor, groups: Groups) -> Tensor:
    """Return each completion the effective share of its group, (sum w)^2 / (size sum w^2).

    As an outer factor: estimates of equal expectation are best averaged by the inverse of their variances,
    and a group's variance goes with the inverse of its effective sample size.

    Args:
        log_weight: [n], nats.
        groups: the n completions by prompt.

    Returns:
        [n], float64, in [1/size, 1], without gradient.
    """
    data = log_weight.detach().double()
    log_share = 2 * groups.logsumexp(data) - groups.logsumexp(2 * data) - groups.size(data).log()
    return groups.spread(log_share.clamp(max=0).exp())


def _log_ratio(learner_logprob: Tensor, other_logprob: Tensor) -> Tensor:
    if learner_logprob.shape != other_logprob.shape:
        raise ValueError(
            f"learner_logprob has shape {tuple(learner_logprob.shape)}, "
            f"the other {tuple(other_logprob.shape)}"
        )
    return learner_logprob - other_logprob.detach().to(learner_logprob.dtype)
