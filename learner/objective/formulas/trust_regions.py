"""Trust regions and gates: which tokens or completions have moved too far to count, or how much they count.

All are data, without gradient.
"""

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

HELD_NATS: Final = 2.0
"""A token counts at most this in how far its completion moved: an outlier among eight moves it by 0.25."""


def within_band(log_ratio: Tensor, *, least: float, most: float) -> Tensor:
    """Return where least <= p/q <= most: [...], bool.

    Source: IcePop, in "Every Step Evolves", arXiv:2510.18855, section 3.
    """
    ratio = log_ratio.detach().exp()  # only compared: infinity is above every bound, as it should be
    return (ratio >= least) & (ratio <= most)


def without_outlier(log_ratio: Tensor, mask: Tensor, *, least: float) -> Tensor:
    """Return which completions have no token whose ratio is below ``least``: [n], bool, from [n, t].

    Source: the token veto of slime's rejection sampling.
    """
    return ~((log_ratio.detach().exp() < least) & mask).any(dim=1)


def within_total_variation(
    learner_logprob: Tensor, behaviour_logprob: Tensor, advantage: Tensor, *, limit: float
) -> Tensor:
    """Return which tokens have not yet moved by ``limit`` of probability the way they are pushed: [n, t].

    False where p - q > limit and the token is good, or q - p > limit and it is bad. Logprobs are [n, t],
    nats; advantages [n].

    Source: DPPO with binary total variation, arXiv:2602.04879, section 4.
    """
    moved = learner_logprob.detach().exp() - behaviour_logprob.detach().exp()
    is_good, is_bad = (advantage > 0)[:, None], (advantage < 0)[:, None]
    return ~((is_good & (moved > limit)) | (is_bad & (moved < -limit)))


def largest_move(staleness_versions: Tensor, *, per_root_version: float, most_nats: float) -> Tensor:
    """Return how far a completion's mean log ratio may have moved, nats a token, by age: [n], float64.

    c sqrt(age), at least c and at most ``most_nats``: a random walk of the policy, whose steps move log p/q
    of a token by c, ``per_root_version``.
    """
    age = staleness_versions.detach().double().clamp(min=1)
    return (per_root_version * age.sqrt()).clamp(max=most_nats)


def has_moved(log_ratio: Tensor, mask: Tensor, advantage: Tensor, *, limit: Tensor) -> Tensor:
    """Return which completions have already moved by ``limit`` the way they are pushed: [n], bool.

    Args:
        log_ratio: [n, t], nats, log p/q; each is held within ``HELD_NATS``.
        mask: [n, t]
        advantage: [n]
        limit: [n], nats a token.
    """
    held = torch.where(mask, log_ratio.detach().double().clamp(-HELD_NATS, HELD_NATS), 0.0)
    mean = held.sum(dim=1) / mask.sum(dim=1)
    return ((advantage > 0) & (mean > limit)) | ((advantage < 0) & (mean < -limit))


def delight_gate(learner_logprob: Tensor, advantage: Tensor, *, temperature: float) -> Tensor:
    """Return sigmoid(U l / eta), l = -log p: near 1 for rare successes, near 0 for rare failures.

    Args:
        learner_logprob: [n, t], nats.
        advantage: U, [n].
        temperature: eta > 0, nats times the unit of U.

    Returns:
        [n, t], in (0, 1).

    Source: Delightful Policy Gradient, arXiv:2603.14608, section 2.
    """
    return torch.sigmoid(-learner_logprob.detach() * advantage.detach()[:, None] / temperature)


def fading_delight_gate(
    learner_logprob: Tensor, advantage: Tensor, share: Tensor, *, temperature: float
) -> Tensor:
    """Return (2 sigmoid(A l / eta))^f, l = -log p: no gate where f is 0, twice the delight gate at 1.

    The factor 2 makes the gate 1 where A l is 0, so that groups of different f are of one scale.

    Args:
        learner_logprob: [n], nats per token.
        advantage: A, [n].
        share: f of each completion, [n], in [0, 1].
        temperature: eta > 0, nats times the unit of A.

    Returns:
        [n], in (0, 2), in the type of ``learner_logprob``.
    """
    surprise = -learner_logprob.detach().double() * advantage.detach().double() / temperature
    return torch.exp(share.double() * (logsigmoid(surprise) + math.log(2))).to(learner_logprob.dtype)
