"""The distribution a token is drawn from: temperature, then top-k, then top-p, renormalised."""

import torch
from torch import Tensor


def sampling_logprob(logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Give the log-probability of every token under what is sampled from; -inf for tokens cut off.

    The nucleus is the smallest set of most likely tokens whose mass, renormalised after top-k,
    reaches ``top_p``; it is never empty. Equally likely tokens are kept in order of their id.

    Args:
        logits: [rows, vocabulary], any floating dtype; computed on in float32.
        temperature: [rows], > 0.
        top_k: [rows], 0 keeps all.
        top_p: [rows], in (0, 1]; 1 keeps all.

    Returns:
        [rows, vocabulary], float32, nats; each row's exponentials sum to 1.
    """
    logprob = torch.log_softmax(logits.float() / temperature.unsqueeze(-1), dim=-1)
    if not bool(((top_k > 0) | (top_p < 1)).any()):
        return logprob
    ordered, order = logprob.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprob.shape[-1], device=logprob.device)
    beyond_k = (top_k > 0).unsqueeze(-1) & (rank >= top_k.unsqueeze(-1))
    ordered = torch.log_softmax(ordered.masked_fill(beyond_k, -torch.inf), dim=-1)
    mass_before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    beyond_p = (top_p < 1).unsqueeze(-1) & (mass_before >= top_p.unsqueeze(-1)) & (rank > 0)
    ordered = torch.log_softmax(ordered.masked_fill(beyond_p, -torch.inf), dim=-1)
    return torch.empty_like(logprob).scatter_(-1, order, ordered)
