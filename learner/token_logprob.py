"""Log-probabilities of given tokens from hidden states, a bounded number of logits at a time.

Logits of a whole batch, [tokens, vocabulary] in float32, are most of a step's memory: 2.5 GB for 4096
tokens of a vocabulary of 151 936. Here they exist one chunk at a time, forward and backward; the
backward pass makes them again, unless one chunk was enough and has been kept.
"""

from typing import Any, Final

import torch
from torch import Tensor

CHUNK_LOGITS: Final = 1 << 25
"""Logits in memory at once: 128 MiB in float32. At 151 936 tokens of vocabulary that is 220 rows, enough for
matrix products at full speed."""


def token_logprob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    target_ids: Tensor,
    temperature: Tensor,
    compute_dtype: torch.dtype | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> Tensor:
    """Give log softmax((hidden @ weight.T + bias) / temperature) at the target of each row.

    Args:
        hidden: [tokens, width]
        weight: [vocabulary, width]
        bias: [vocabulary] or None.
        target_ids: [tokens], int64.
        temperature: [tokens], > 0.
        compute_dtype: of matrix products; None: that of ``weight``. Softmax and sums are float32 at least.
        chunk_logits: logits in memory at once, at most; one row's always are.

    Returns:
        [tokens], nats, float32 at least; carries the gradient of ``hidden``, ``weight`` and ``bias``.
    """
    rows = max(1, chunk_logits // weight.shape[0])
    dtype = compute_dtype or weight.dtype
    logprob: Tensor = _TokenLogprob.apply(hidden, weight, bias, target_ids, temperature, dtype, rows)  # type: ignore[no-untyped-call]
    return logprob


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        temperature: Tensor,
        dtype: torch.dtype,
        rows: int,
    ) -> Tensor:
        temperature = temperature.to(_wide(hidden.dtype))
        head = weight.to(dtype)
        normalisers, chosen = [], []
        logits = hidden.new_empty(0)
        for part in _parts(len(hidden), rows):
            logits = _logits(hidden[part], head, bias, temperature[part])
            normalisers.append(torch.logsumexp(logits, dim=-1))
            chosen.append(logits.gather(-1, target_ids[part, None]).squeeze(-1))
        normaliser = torch.cat(normalisers)
        ctx.dtype, ctx.rows = dtype, rows
        ctx.kept_logits = logits if len(normalisers) == 1 else None
        ctx.save_for_backward(hidden, weight, bias, target_ids, temperature, normaliser)
        return torch.cat(chosen) - normaliser

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids, temperature, normaliser = ctx.saved_tensors
        head = weight.to(ctx.dtype)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight)
        to_bias = None if bias is None else torch.zeros_like(bias)
        for part in _parts(len(hidden), ctx.rows):
            logits, ctx.kept_logits = ctx.kept_logits, None
            if logits is None:
                logits = _logits(hidden[part], head, bias, temperature[part])
            upstream = (gradient[part] / temperature[part]).unsqueeze(-1)
            # In place from logits to their gradient, (one hot - softmax) * upstream.
            logits.sub_(normaliser[part, None]).exp_().mul_(-upstream)
            logits.scatter_add_(-1, target_ids[part, None], upstream)
            narrow = logits.to(ctx.dtype)
            to_hidden[part] = narrow @ head
            to_weight += narrow.T @ hidden[part].to(ctx.dtype)
            if to_bias is not None:
                to_bias += logits.sum(dim=0)
        return to_hidden, to_weight, to_bias, None, None, None, None


def _parts(tokens: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, max(tokens, 1), rows)]


def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    logits = (hidden.to(head.dtype) @ head.T).to(temperature.dtype)
    if bias is not None:
        logits += bias
    return logits.div_(temperature.unsqueeze(-1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
