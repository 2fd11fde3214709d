"""The distribution a token is drawn from: temperature, then top-k, then top-p, renormalised."""

from typing import NamedTuple

import torch
from torch import Tensor


class Distribution(NamedTuple):
    """What tokens are drawn from."""

    logprob: Tensor
    """[rows, vocabulary], float32, nats, -inf for tokens cut off; each row's exponentials sum to 1."""
    kept_mass: Tensor
    """[rows], float32, in (0, 1]: the mass of the remaining tokens under the whole softmax."""


def sampling_distribution(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Distribution:
    """Return the distribution that each row's token is drawn from.

    The nucleus is the smallest set of most likely tokens whose mass, renormalised after top-k,
    reaches ``top_p``; it is never empty. Equally likely tokens are kept in order of their id.

    Args:
        logits: [rows, vocabulary], any floating dtype; computed on in float32.
        temperature: [rows], > 0.
        top_k: [rows], 0 keeps all.
        top_p: [rows], in (0, 1]; 1 keeps all.
    """
    logprob = torch.log_softmax(logits.float() / temperature.unsqueeze(-1), dim=-1)
    if not bool(((top_k > 0) | (top_p < 1)).any()):
        return Distribution(logprob, torch.ones_like(logprob[:, 0]))
    whole, order = logprob.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprob.shape[-1], device=logprob.device)
    beyond_k = (top_k > 0).unsqueeze(-1) & (rank >= top_k.unsqueeze(-1))
    ordered = torch.log_softmax(whole.masked_fill(beyond_k, -torch.inf), dim=-1)
    mass_before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    beyond_p = (top_p < 1).unsqueeze(-1) & (mass_before >= top_p.unsqueeze(-1)) & (rank > 0)
    ordered = torch.log_softmax(ordered.masked_fill(beyond_p, -torch.inf), dim=-1)
    kept_mass = whole.masked_fill(ordered == -torch.inf, -torch.inf).logsumexp(dim=-1).exp()
    return Distribution(torch.empty_like(logprob).scatter_(-1, order, ordered), kept_mass.clamp(max=1.0))
