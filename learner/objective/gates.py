"""Which tokens count, and how much, decided by numbers that carry no gradient."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


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


def within_sequence_divergence(log_ratio: Tensor, mask: Tensor, advantage: Tensor, *, limit: float) -> Tensor:
    """Return which completions stay: all good ones, and the bad ones that the learner has not left behind.

    Left behind: the mean over its tokens of log q/p is above ``limit``.

    Args:
        log_ratio: [n, t], nats, log p/q.
        mask: [n, t]
        advantage: [n]
        limit: nats a token.

    Returns:
        [n], bool.

    Source: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    divergence = -torch.where(mask, log_ratio.detach(), 0.0).sum(dim=1) / mask.sum(dim=1)
    return (advantage >= 0) | (divergence <= limit)


def within_total_variation(
    learner_logprob: Tensor, behaviour_logprob: Tensor, advantage: Tensor, *, limit: float
) -> Tensor:
    """Return which tokens have not yet moved by ``limit`` of probability the way they are pushed.

    Args:
        learner_logprob: [n, t], nats.
        behaviour_logprob: [n, t], nats.
        advantage: [n]
        limit: in (0, 1), of |p - q|.

    Returns:
        [n, t], bool: False where p - q > limit and the token is good, or q - p > limit and it is bad.

    Source: DPPO with binary total variation, arXiv:2602.04879, section 4.
    """
    moved = learner_logprob.detach().exp() - behaviour_logprob.detach().exp()
    is_good, is_bad = (advantage > 0)[:, None], (advantage < 0)[:, None]
    return ~((is_good & (moved > limit)) | (is_bad & (moved < -limit)))


def within_second_moment(log_ratio: Tensor, mask: Tensor, *, limit: float) -> Tensor:
    """Return which tokens stay: those of largest log^2 ratio go, until its mean over the rest is low enough.

    Equal squares stay or go together, so that the order of tokens does not matter.

    Args:
        log_ratio: [n, t], nats.
        mask: [n, t]
        limit: of the mean of log^2 ratio, > 0.

    Returns:
        [n, t], bool; False outside the mask.

    Source: M2PO, arXiv:2510.01161, algorithm 1.
    """
    squares = log_ratio.detach().double()[mask] ** 2
    ordered = squares.sort().values
    up_to = torch.searchsorted(ordered, squares, right=True)
    stays = ordered.cumsum(0)[up_to - 1] / up_to <= limit
    return torch.zeros_like(mask).masked_scatter(mask, stays)


def delight_gate(learner_logprob: Tensor, advantage: Tensor, *, temperature: float) -> Tensor:
    """Return sigmoid(U l / eta), l = -log p: near 1 for rare successes, near 0 for rare failures.

    Args:
        learner_logprob: [n, t], nats.
        advantage: U, [n].
        temperature: eta > 0, nats times the unit of U.

    Returns:
        [n, t], in (0, 1), without gradient.

    Source: Delightful Policy Gradient, arXiv:2603.14608, section 2.
    """
    return torch.sigmoid(-learner_logprob.detach() * advantage.detach()[:, None] / temperature)


def delight(learner_logprob: Tensor, advantage: Tensor) -> Tensor:
    """Return U l, l = -log p: what a token is worth learning from, [n, t], without gradient.

    Args:
        learner_logprob: [n, t], nats.
        advantage: U, [n].

    Source: arXiv:2603.14608, section 2.
    """
    return -learner_logprob.detach() * advantage.detach()[:, None]


def above_price(delight_of_tokens: Tensor, *, price: float) -> Tensor:
    """Return where delight exceeds a price: DG's gate at temperature 0, [n, t], bool.

    Source: the hard limit of sigmoid((delight - price) / eta), arXiv:2603.20526, section 2.
    """
    return delight_of_tokens > price


def within_top_share(values: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """Return which tokens are among the ``share`` of largest value, one at least; equal values stay together.

    Args:
        values: [n, t]
        mask: [n, t], with a token.
        share: in (0, 1]; of the tokens, rounded to a number of them.

    Returns:
        [n, t], bool; False outside the mask.

    Source: the Kondo gate, arXiv:2603.20526; rounding as in its authors' code.
    """
    of_tokens = values.detach()[mask]
    kept = max(1, round(share * len(of_tokens)))
    return mask & (values.detach() >= of_tokens.topk(kept).values[-1])


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
        [n], in (0, 2), without gradient, in the type of ``learner_logprob``.
    """
    surprise = -learner_logprob.detach().double() * advantage.detach().double() / temperature
    return torch.exp(share.double() * (logsigmoid(surprise) + math.log(2))).to(learner_logprob.dtype)
