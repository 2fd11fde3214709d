"""How much each completion counts, given that an older policy wrote it.

Everything happens in log space on *mean* token log-probabilities: with sums over the sequence
instead, one completion of a group would take all the weight.
"""

import torch
from torch import Tensor


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
    r"""Give p_i / E for completions whose group expectation is known already.

    Args:
        learner_logprob: [completions], nats per token; carries the gradient.
        log_expectation: scalar or [completions], nats: ``log_group_expectation`` of each one's group.

    Returns:
        [completions], dimensionless; in the type of ``learner_logprob``.
    """
    return torch.exp(learner_logprob - log_expectation.to(learner_logprob.dtype))


def log_group_expectation(behaviour_logprob: Tensor) -> Tensor:
    r"""Give log E_q[q(y|x)], estimated from one group by sum_j q_j^2 / sum_j q_j.

    Computed as LSE(2 lq) - LSE(lq) in float64; mean(q) <= E <= max(q). It depends on no
    parameter, so a group may be split among micro-batches once this number is known.

    Args:
        behaviour_logprob: [group], nats per token.

    Returns:
        Scalar, nats, float64, without gradient.

    Raises:
        ValueError: the group is empty or not one-dimensional, or a value is not finite.

    Source: arXiv:2508.17850, eq. 3.
    """
    if behaviour_logprob.ndim != 1 or len(behaviour_logprob) == 0:
        raise ValueError(
            f"behaviour_logprob has shape {tuple(behaviour_logprob.shape)}; a group has one axis "
            "and at least one completion"
        )
    data = behaviour_logprob.detach().double()
    if not data.isfinite().all():
        raise ValueError(f"behaviour_logprob {data.tolist()} is not finite everywhere")
    return torch.logsumexp(2 * data, dim=0) - torch.logsumexp(data, dim=0)
