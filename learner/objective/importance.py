"""How much each completion counts, given that an older policy wrote it.

Everything happens in log space on *mean* token log-probabilities: with sums over the sequence
instead, one completion of a group would take all the weight.
"""

import math

import torch
from torch import Tensor

from learner.objective.groups import Groups
from learner.objective.log_ratio import bounded_ratio


def group_expectation_weight(learner_logprob: Tensor, behaviour_logprob: Tensor) -> Tensor:
    r"""Weigh each completion of one group by p(y|x) / E_q[q(y|x)].

    With p and q the length-normalised probabilities under the learner and the behaviour policy,
    w_i = p_i / (sum_j q_j^2 / sum_j q_j). The gradient flows through ``learner_logprob`` only;
    the denominator is data. On policy (p = q) the weight is q_i / E, not 1.

    Args:
        learner_logprob: [group], nats per token, under the parameters being trained.
        behaviour_logprob: [group], nats per token, recorded when the completion was sampled.

    Returns:
        [group], dimensionless, > 0; in the type of ``learner_logprob``.

    Raises:
        ValueError: the shapes differ, the group is empty or not one-dimensional, or a behaviour
            logprob is not finite.

    Source: Group Expectation Policy Optimization, arXiv:2508.17850, eq. 2-3.
    """
    if learner_logprob.shape != behaviour_logprob.shape:
        raise ValueError(
            f"learner_logprob has shape {tuple(learner_logprob.shape)}, "
            f"behaviour_logprob {tuple(behaviour_logprob.shape)}; both must be [group]"
        )
    return expectation_weight(learner_logprob, log_group_expectation(behaviour_logprob))


def expectation_weight(learner_logprob: Tensor, log_expectation: Tensor) -> Tensor:
    r"""Return p_i / E for completions whose group expectation is known already.

    Args:
        learner_logprob: [completions], nats per token; carries the gradient.
        log_expectation: scalar or [completions], nats: ``log_group_expectation`` of each one's group.

    Returns:
        [completions], dimensionless; in the type of ``learner_logprob``.
    """
    return bounded_ratio(learner_logprob - log_expectation.to(learner_logprob.dtype))


def log_group_expectation(behaviour_logprob: Tensor, groups: Groups | None = None) -> Tensor:
    r"""Return log E_q[q(y|x)], estimated from one group by sum_j q_j^2 / sum_j q_j.

    Computed as LSE(2 lq) - LSE(lq) in float64; mean(q) <= E <= max(q). It depends on no
    parameter, so a group may be split among micro-batches once this number is known.

    Args:
        behaviour_logprob: [n], nats per token.
        groups: the n completions by prompt; None: all of one.

    Returns:
        Nats, float64, without gradient: [n], each completion's own group's; a scalar where
        ``groups`` is None.

    Raises:
        ValueError: there is no completion, more than one axis, or a value is not finite.

    Source: arXiv:2508.17850, eq. 3.
    """
    data, by_prompt = _data(behaviour_logprob), groups or Groups.single(behaviour_logprob)
    per_group = by_prompt.logsumexp(2 * data) - by_prompt.logsumexp(data)
    return per_group[0] if groups is None else by_prompt.spread(per_group)


def log_group_mean(behaviour_logprob: Tensor, groups: Groups | None = None) -> Tensor:
    """Return log mean_j q_j: the estimate of E_q[q] without bias, as each y_j is drawn from q already.

    GEPO's sum q^2 / sum q converges to sum q^3 / sum q^2 instead, which is larger.

    Args, returns, raises: as ``log_group_expectation``.
    """
    data, by_prompt = _data(behaviour_logprob), groups or Groups.single(behaviour_logprob)
    per_group = by_prompt.logsumexp(data) - by_prompt.size(data).log()
    return per_group[0] if groups is None else by_prompt.spread(per_group)


def log_expected_learner(
    learner_logprob: Tensor, behaviour_logprob: Tensor, groups: Groups | None = None
) -> Tensor:
    """Return log sum_j q-hat_j p_j, with q-hat the group's behaviour probabilities over their sum.

    The mean weight under q-hat is then 1. The gradient flows through every p_j of the group.

    Args:
        learner_logprob: [n], nats per token; carries the gradient.
        behaviour_logprob: [n], nats per token.
        groups: the n completions by prompt; None: all of one.

    Returns:
        Nats, float64; shaped as ``log_group_expectation`` gives it.

    Source: the EqP variant of arXiv:2508.17850.
    """
    data, by_prompt = _data(behaviour_logprob), groups or Groups.single(behaviour_logprob)
    per_group = by_prompt.logsumexp(data + learner_logprob.double()) - by_prompt.logsumexp(data)
    return per_group[0] if groups is None else by_prompt.spread(per_group)


def log_defensive_mixture(learner_logprob: Tensor, behaviour_logprob: Tensor, *, share: float) -> Tensor:
    """Return log(a sg(p) + (1 - a) q): a denominator under which no weight exceeds 1/a.

    Args:
        learner_logprob: [...], nats.
        behaviour_logprob: [...], nats.
        share: a, in (0, 1).

    Returns:
        [...], nats, float64, without gradient.

    Source: defensive importance sampling, Hesterberg, Technometrics 37 (1995).
    """
    p, q = learner_logprob.detach().double(), behaviour_logprob.detach().double()
    return torch.logaddexp(p + math.log(share), q + math.log1p(-share))


def log_expectation_where_far(
    behaviour_logprob: Tensor, log_expectation: Tensor, divergence: Tensor, *, threshold: float
) -> Tensor:
    """Return log q_i where a completion's divergence is below the threshold, else log E of its group.

    At threshold 0 that is log E everywhere, on policy too.

    Args:
        behaviour_logprob: [n], nats per token.
        log_expectation: [n], nats per token.
        divergence: [n], nats, as ``completion_divergence`` gives it.
        threshold: nats, >= 0.

    Returns:
        [n], nats, float64, without gradient.

    Source: the GEPO-plus variant of arXiv:2508.17850.
    """
    is_near = divergence.detach() < threshold
    return torch.where(is_near, behaviour_logprob.detach().double(), log_expectation.detach())


def geometric_mean_weight(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return (prod_t p_t / q_t)^(1 / tokens), the length-normalised ratio of a completion: [n] from [n, t].

    Source: GSPO, arXiv:2507.18071, eq. 7.
    """
    return bounded_ratio(torch.where(mask, log_ratio, 0.0).sum(dim=1) / mask.sum(dim=1))


def clipped_geometric_mean_weight(
    log_ratio: Tensor, mask: Tensor, advantage: Tensor, *, log_clip: float
) -> Tensor:
    """Return the geometric mean of token ratios, each held from moving further the way it is pushed.

    Token by token min(log rho, c) where the advantage is >= 0, max(log rho, -c) where it is not.

    Args:
        log_ratio: [n, t], nats; carries the gradient.
        mask: [n, t]
        advantage: [n]
        log_clip: c > 0, nats: ratios within e^-c and e^c are whole.

    Returns:
        [n]

    Source: GMPO, arXiv:2507.20673, eq. 4.
    """
    is_good = (advantage >= 0)[:, None]
    held = torch.where(is_good, log_ratio.clamp(max=log_clip), log_ratio.clamp(min=-log_clip))
    return geometric_mean_weight(held, mask)


def log_linear_proximal(
    learner_logprob: Tensor, behaviour_logprob: Tensor, staleness_versions: Tensor
) -> Tensor:
    """Approximate the logprobs of the version before the learner's, from versions on either side of it.

    log prox = log q + (1 - 1/d) (log p - log q), d versions of staleness; q itself for d <= 1.

    Args:
        learner_logprob: [n, t], nats.
        behaviour_logprob: [n, t], nats.
        staleness_versions: [n], >= 0.

    Returns:
        [n, t], nats, without gradient.

    Source: A-3PO, arXiv:2512.06547; AReaL's ``prox_logp_method = loglinear``.
    """
    p, q = learner_logprob.detach(), behaviour_logprob.detach()
    share = 1 - 1 / staleness_versions.to(p.dtype).clamp(min=1)
    return q + share[:, None] * (p - q)


def gamma_weight(log_ratio: Tensor, *, power: Tensor, rate: Tensor) -> Tensor:
    """Return W^k exp(lambda (1 - W)), 1 at W = 1, and 0 at both ends.

    Args:
        log_ratio: [n], nats: log W of whole completions, not normalised by length.
        power: [n], k > 0.
        rate: [n], lambda > 0.

    Returns:
        [n], without gradient.

    Source: VESPO, arXiv:2602.10693; log W is held within 20 as in its code.
    """
    log_w = log_ratio.detach().clamp(-20, 20)
    return bounded_ratio(power * log_w + rate * (1 - log_w.exp()))


def _data(behaviour_logprob: Tensor) -> Tensor:
    data = behaviour_logprob.detach().double()
    if not data.isfinite().all():
        raise ValueError(f"behaviour_logprob {data.tolist()} is not finite everywhere")
    return data
