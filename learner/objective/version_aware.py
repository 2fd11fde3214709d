"""Denominators between a completion's own q and its group's expectation, by how far the policies are apart.

    log D_i = (1 - a) log q_i + a log E,    w_i = p_i / D_i

a = 0 where the policies agree: the weight is then p/q, which is 1. a = 1 where nothing is left of
the agreement: the weight is GEPO's. Derivation, figures and plots: README.md in this folder.
"""

import torch
from torch import Tensor

from learner.objective.divergence import group_sample_size_ratio
from learner.objective.groups import Groups


def trust_by_sample_size(log_ratio: Tensor, groups: Groups, *, power: float) -> Tensor:
    """Return a = (1 - ESS/size)^power of each completion's group under the plain weights p/q.

    Args:
        log_ratio: [n], nats: log of each completion's p/q, normalised by length as the weights are.
        groups: the n completions by prompt.
        power: > 0; higher leaves the plain weights alone for longer.

    Returns:
        [n], float64, in [0, 1), equal within a group, without gradient.
    """
    return (1 - group_sample_size_ratio(log_ratio, groups)) ** power


def trust_by_divergence(divergence: Tensor, *, scale_nats: float) -> Tensor:
    """Return a = 1 - exp(-divergence / scale).

    At scale 1/2 this is the limit of 1 - ESS/size in large groups where p and q are Gaussians of
    equal width, and to second order for any p near q. It needs no other completion.

    Args:
        divergence: [n], nats, >= 0: of each completion.
        scale_nats: > 0.

    Returns:
        [n], float64, in [0, 1), without gradient.
    """
    return -torch.expm1(-divergence.detach().double() / scale_nats)


def log_version_aware_denominator(
    behaviour_logprob: Tensor, log_expectation: Tensor, trust: Tensor
) -> Tensor:
    """Return (1 - a) log q_i + a log E.

    Args:
        behaviour_logprob: [n], nats per token.
        log_expectation: [n], nats per token: of each completion's group.
        trust: a of each completion, [n], in [0, 1]: how far to trust the group over the completion.

    Returns:
        [n], nats, float64, without gradient.
    """
    q, a = behaviour_logprob.detach().double(), trust.detach().double()
    return (1 - a) * q + a * log_expectation.detach().double()
