"""Two ways to draw a token from each row of a batch, neither of which waits for the device."""

import torch
from torch import Tensor


def by_noise(logprob: Tensor, generator: torch.Generator) -> Tensor:
    """Return a token of each row, [rows]: where p/q is largest, with exponential noise q.

    The same as ``torch.multinomial(logprob.exp(), 1)`` draws, whose checks would wait for the device.

    Args:
        logprob: [rows, vocabulary], nats, normalised; -inf is never drawn.
    """
    noise = torch.empty_like(logprob).exponential_(generator=generator)
    return logprob.exp().div_(noise).argmax(dim=-1)


def by_inverse(logprob: Tensor, generator: torch.Generator) -> Tensor:
    """Return a token of each row, [rows]: the first whose cumulative probability is above a uniform number.

    Args:
        logprob: as in ``by_noise``.
    """
    # In float64: float32 would round away what a rare token adds.
    cumulative = logprob.exp().cumsum(dim=-1, dtype=torch.float64)
    rows, words = logprob.shape
    uniform = torch.rand((rows, 1), dtype=torch.float64, device=logprob.device, generator=generator)
    above = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return above.squeeze(-1).clamp(max=words - 1)
