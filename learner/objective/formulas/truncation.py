r"""Logprobs of truncated sampling, made comparable with the learner's.

Min-p, top-k and top-p leave a set S of the vocabulary, whose share of the softmax (after temperature) is the
kept mass m = q~(S). Tokens are drawn from q = q~/m on S; the learner's p is its whole softmax. With
p/q every weight is m too small, p = q~ included. So behaviour logprobs are brought back to q~:

    log q~ = log q + log m,        weight = p / q~ = (p/q) / m

What the weight is unbiased for. For any f, with p_S = p / p(S) the learner cut off at the same set,

    E_q[ (p/q~) f ] = (p(S) / m) E_{p_S}[ f ]

On policy (p = q~) it is 1 and the expectation that of the truncated policy, exactly. Off policy it is
off by how far the mass of S has moved since, p(S)/m, never by m itself. Nothing is learned of tokens
outside S: no weight can speak for what is never drawn. And the gradient is that of the whole softmax,
grad log p = grad log p_S + grad log p(S): an advantage that does not average to 0 moves mass into S, or
out of it. Sampling that is truncated little (m near 1) keeps both small.
"""

import torch
from torch import Tensor


def untruncated_logprob(behaviour_logprob: Tensor, kept_mass: Tensor) -> Tensor:
    """Return log q~ = log q + log m of each token, [...], nats: its logprob under the whole softmax.

    ``behaviour_logprob`` is normalised over the tokens kept, which hold ``kept_mass``, in (0, 1], of the
    softmax.

    Raises:
        ValueError: the shapes differ.
    """
    if behaviour_logprob.shape != kept_mass.shape:
        raise ValueError(
            f"behaviour_logprob has shape {tuple(behaviour_logprob.shape)}, "
            f"kept_mass {tuple(kept_mass.shape)}"
        )
    return behaviour_logprob + torch.log(kept_mass).to(behaviour_logprob.dtype)


def least_kept_mass(*, min_p: float, top_p: float, top_k: int, vocabulary_size: int) -> float:
    """Return the least share of any softmax that truncation can leave: a smaller claim is false.

    The k likeliest of V tokens hold k/V at least. Where min-p leaves one token of probability p, the V - 1
    others have less than min_p * p each: it holds 1 / (1 + (V - 1) min_p) at least. Together they leave the
    lesser of the two. The nucleus holds top_p of what is left, at least. A top_k of 0 keeps all.
    """
    likeliest = min(top_k, vocabulary_size) / vocabulary_size if top_k else 1.0
    return top_p * min(likeliest, 1.0 / (1.0 + (vocabulary_size - 1) * min_p))
