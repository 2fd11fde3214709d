"""The distribution a token is drawn from, and two ways to draw that never wait for the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.decoding.kv_cache import uploaded


@dataclass(frozen=True, slots=True, eq=False)
class RowSampling:
    """The sampling parameters of each row, on the device, and what the CPU needs to know of them."""

    temperature: Tensor
    """[rows], > 0."""
    min_p: Tensor
    """[rows], in [0, 1]; 0 keeps all."""
    top_k: Tensor
    """[rows], 0 keeps all."""
    top_p: Tensor
    """[rows], in (0, 1]; 1 keeps all."""
    is_tempered: bool
    """Whether any row has a temperature other than 1."""
    is_truncated: bool
    """Whether any row is."""
    is_ranked: bool
    """Whether any row has a top-k or a top-p, for which the vocabulary is sorted."""

    @classmethod
    def of(cls, rows: Sequence[SamplingParameters], *, device: torch.device) -> Self:
        """Upload the parameters of each row."""
        columns = [[s.temperature, s.min_p, s.top_p] for s in rows]
        temperature, min_p, top_p = uploaded(columns, dtype=torch.float32, device=device).unbind(dim=-1)
        return cls(
            temperature,
            min_p,
            uploaded([s.top_k for s in rows], device=device),
            top_p,
            is_tempered=any(s.temperature != 1 for s in rows),
            is_truncated=any(s.is_truncated for s in rows),
            is_ranked=any(s.top_k > 0 or s.top_p < 1 for s in rows),
        )


class Distribution(NamedTuple):
    """The probabilities that tokens are drawn from."""

    logprob: Tensor
    """[rows, vocabulary], float32, nats, -inf for tokens cut off; each row's exponentials sum to 1."""
    kept_mass: Tensor
    """[rows], float32, in (0, 1]: the mass of the remaining tokens under the whole softmax."""


def sampling_distribution(logits: Tensor, sampling: RowSampling) -> Distribution:
    """Return the distribution of each row: temperature, then min-p, top-k and top-p, renormalised.

    Tokens less likely than ``min_p`` times the likeliest are cut off, then all but the ``top_k`` likeliest.
    The nucleus is the smallest set of most likely tokens whose mass, renormalised over what is left, reaches
    ``top_p``. The likeliest token is never cut off. Equally likely tokens are kept in order of their id.

    Args:
        logits: [rows, vocabulary], any floating dtype; computed on in float32.
    """
    if sampling.is_tempered:
        logits = logits.float() / sampling.temperature.unsqueeze(-1)
    whole = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    if not sampling.is_truncated:
        return Distribution(whole, torch.ones_like(whole[:, 0]))
    likeliest = whole.amax(dim=-1, keepdim=True)
    kept = whole.masked_fill(whole < likeliest + sampling.min_p.log().unsqueeze(-1), -torch.inf)
    if sampling.is_ranked:
        kept = _nucleus(kept, sampling)
    log_mass = kept.logsumexp(dim=-1)
    return Distribution(kept - log_mass.unsqueeze(-1), log_mass.exp().clamp(max=1.0))


def _nucleus(logprob: Tensor, sampling: RowSampling) -> Tensor:
    """Return ``logprob`` with -inf for the tokens that top-k and top-p cut off."""
    ordered, order = logprob.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprob.shape[-1], device=logprob.device)
    top_k, top_p = sampling.top_k.unsqueeze(-1), sampling.top_p.unsqueeze(-1)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    mass = torch.softmax(ordered, dim=-1)
    mass_before = mass.cumsum(dim=-1) - mass
    beyond_p = (top_p < 1) & (mass_before >= top_p) & (rank > 0)
    return torch.empty_like(logprob).scatter_(-1, order, ordered.masked_fill(beyond_p, -torch.inf))


def by_noise(logprob: Tensor, generator: torch.Generator) -> Tensor:
    """Return a token of each row, [rows]: where p/q is largest, with exponential noise q.

    The same as ``torch.multinomial(logprob.exp(), 1)`` draws, whose checks would wait for the device.

    Args:
        logprob: [rows, vocabulary], nats, normalised; -inf is never drawn.
    """
    noise = torch.empty_like(logprob).exponential_(generator=generator)
    return logprob.exp().div_(noise).argmax(dim=-1)


def by_inverse(logprob: Tensor, generator: torch.Generator) -> Tensor:
    """Return a token of each row, [rows]: the first of cumulative probability above a uniform number."""
    # In float64: float32 would round away what a rare token adds.
    cumulative = logprob.exp().cumsum(dim=-1, dtype=torch.float64)
    rows, words = logprob.shape
    uniform = torch.rand((rows, 1), dtype=torch.float64, device=logprob.device, generator=generator)
    above = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return above.squeeze(-1).clamp(max=words - 1)
