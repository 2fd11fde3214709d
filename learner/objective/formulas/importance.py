r"""Weights p/q and their kin: how much each completion counts, given that an older policy wrote it.

Everything happens in log space on *mean* token log-probabilities: with sums over the sequence
instead, one completion of a group would take all the weight.

Between p/q and GEPO's p/E lie the version-aware denominators:

    log D_i = (1 - a) log q_i + a log E,    w_i = p_i / D_i

with a = 0 where the policies agree, so that the weight is p/q, which is 1, and a = 1 where nothing is left of
the agreement. Derivation, figures and plots: ``learner/objective/README.md``.

Unless said otherwise logprobs are [n], nats per token; denominators are nats, float64, without gradient;
``groups`` are the n completions by prompt, None: all of one.
"""

import math

import torch
from torch import Tensor

from learner.objective.formulas.divergence import group_sample_size_ratio
from learner.objective.formulas.log_ratio import bounded_ratio
from learner.objective.groups import Groups


def expectation_weight(learner_logprob: Tensor, log_expectation: Tensor) -> Tensor:
    r"""Return p_i / E, [n], from the log of each completion's denominator, [n] or a scalar.

    GEPO's E is exp(``log_group_expectation``), data: the gradient flows through ``learner_logprob`` only. On
    policy (p = q) its weight is q_i / E, not 1.

    Source: Group Expectation Policy Optimization, arXiv:2508.17850, eq. 2-3.
    """
    return bounded_ratio(learner_logprob - log_expectation.to(learner_logprob.dtype))


def log_group_expectation(behaviour_logprob: Tensor, groups: Groups | None = None) -> Tensor:
    r"""Return log E_q[q(y|x)], estimated from one group by sum_j q_j^2 / sum_j q_j.

    Computed as LSE(2 lq) - LSE(lq) in float64; mean(q) <= E <= max(q). It depends on no
    parameter, so a group may be split among micro-batches once this number is known.

    Returns:
        [n], each completion's own group's; a scalar where ``groups`` is None.

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

    Returns, raises: as ``log_group_expectation``.
    """
    data, by_prompt = _data(behaviour_logprob), groups or Groups.single(behaviour_logprob)
    per_group = by_prompt.logsumexp(data) - by_prompt.size(data).log()
    return per_group[0] if groups is None else by_prompt.spread(per_group)


def log_expected_learner(
    learner_logprob: Tensor, behaviour_logprob: Tensor, groups: Groups | None = None
) -> Tensor:
    """Return log sum_j q-hat_j p_j, with q-hat the group's behaviour probabilities over their sum.

    The mean weight under q-hat is then 1. The gradient flows through every p_j of the group.

    Returns: as ``log_group_expectation``, with gradient.

    Source: the EqP variant of arXiv:2508.17850.
    """
    data, by_prompt = _data(behaviour_logprob), groups or Groups.single(behaviour_logprob)
    per_group = by_prompt.logsumexp(data + learner_logprob.double()) - by_prompt.logsumexp(data)
    return per_group[0] if groups is None else by_prompt.spread(per_group)


def log_defensive_mixture(learner_logprob: Tensor, behaviour_logprob: Tensor, *, share: float) -> Tensor:
    """Return log(a sg(p) + (1 - a) q), a in (0, 1): a denominator under which no weight exceeds 1/a.

    Source: defensive importance sampling, Hesterberg, Technometrics 37 (1995).
    """
    p, q = learner_logprob.detach().double(), behaviour_logprob.detach().double()
    return torch.logaddexp(p + math.log(share), q + math.log1p(-share))


def log_expectation_where_far(
    behaviour_logprob: Tensor, log_expectation: Tensor, divergence: Tensor, *, threshold: float
) -> Tensor:
    """Return log q_i where a completion's divergence, [n], is below the threshold, nats, else log E.

    At threshold 0 that is log E everywhere, on policy too.

    Source: the GEPO-plus variant of arXiv:2508.17850.
    """
    is_near = divergence.detach() < threshold
    return torch.where(is_near, behaviour_logprob.detach().double(), log_expectation.detach())


def trust_by_sample_size(log_ratio: Tensor, groups: Groups, *, power: float) -> Tensor:
    """Return a = (1 - ESS/size)^power of each completion's group under the plain weights p/q.

    Args:
        log_ratio: [n], nats: log of each completion's p/q, normalised by length as the weights are.
        groups: the n completions by prompt.
        power: > 0; higher leaves the plain weights alone for longer.

    Returns:
        [n], float64, in [0, 1), equal within a group.
    """
    return (1 - group_sample_size_ratio(log_ratio, groups)) ** power


def trust_by_divergence(divergence: Tensor, *, scale_nats: float) -> Tensor:
    """Return a = 1 - exp(-divergence / scale): [n], float64, in [0, 1), from [n], nats, >= 0.

    At scale 1/2 this is the limit of 1 - ESS/size in large groups where p and q are Gaussians of
    equal width, and to second order for any p near q. It needs no other completion.
    """
    return -torch.expm1(-divergence.detach().double() / scale_nats)


def log_version_aware_denominator(
    behaviour_logprob: Tensor, log_expectation: Tensor, trust: Tensor
) -> Tensor:
    """Return (1 - a) log q_i + a log E, with a in [0, 1], [n], the trust in the group's expectation."""
    q, a = behaviour_logprob.detach().double(), trust.detach().double()
    return (1 - a) * q + a * log_expectation.detach().double()


def geometric_mean_weight(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return (prod_t p_t / q_t)^(1 / tokens), the length-normalised ratio of a completion: [n] from [n, t].

    Source: GSPO, arXiv:2507.18071, eq. 7.
    """
    return bounded_ratio(torch.where(mask, log_ratio, 0.0).sum(dim=1) / mask.sum(dim=1))


def log_linear_proximal(
    learner_logprob: Tensor, behaviour_logprob: Tensor, staleness_versions: Tensor
) -> Tensor:
    """Approximate the logprobs, [n, t], of the version before the learner's from versions on either side.

    log prox = log q + (1 - 1/d) (log p - log q), d >= 0 versions of staleness, [n]; q itself for d <= 1.

    Source: A-3PO, arXiv:2512.06547; AReaL's ``prox_logp_method = loglinear``.
    """
    p, q = learner_logprob.detach(), behaviour_logprob.detach()
    share = 1 - 1 / staleness_versions.to(p.dtype).clamp(min=1)
    return q + share[:, None] * (p - q)


def _data(behaviour_logprob: Tensor) -> Tensor:
    data = behaviour_logprob.detach().double()
    if not data.isfinite().all():
        raise ValueError(f"behaviour_logprob {data.tolist()} is not finite everywhere")
    return data
