"""Log-probabilities of given tokens from hidden states, a bounded number of logits at a time.

Logits of a whole batch, [tokens, vocabulary] in float32, are most of a step's memory: 2.5 GB for 4096 tokens
and a vocabulary of 151 936. Here one buffer of bounded size holds a chunk of them at a time, and all work is
done in place. The backward pass computes the chunks again, except the last one, which is still in the buffer;
where one chunk is enough, nothing is computed twice. Logits that a family caps take two buffers of half the
size: the second has the cap's slopes, for the backward pass.

Ranks that each hold a slice of the vocabulary exchange three numbers a token: the largest logit, the sum of
exponentials, and the target's logit. No rank sees another's logits.
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from learner.model.logit_form import PLAIN, LogitForm

CHUNK_LOGITS: Final = 1 << 25
"""Logits in memory at once: 128 MiB in float32. At 151 936 tokens of vocabulary that is 220 rows, enough for
matrix products at full speed. Chunks of 4 MiB, which fit a core's cache, gain a third where vectors
are short (8192 tokens, width 64), and lose half where they are not (32 768 tokens, width 512)."""


class Reduction(Protocol):
    """Exchanges with the ranks that hold the rest of the vocabulary; in place."""

    def add_up(self, values: Tensor) -> None:
        """Replace values by their sum over the ranks."""
        ...

    def take_largest(self, values: Tensor) -> None:
        """Replace values by the largest of the ranks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class VocabularySlice:
    """The tokens whose rows of the head a rank holds: as many on every rank."""

    first: int
    tokens: int
    ranks: Reduction

    def place(self, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where targets lie in the slice, and whether they do; a place is valid either way."""
        place = target_ids - self.first
        is_here = (place >= 0) & (place < self.tokens)
        return torch.where(is_here, place, 0), is_here


def token_logprob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    target_ids: Tensor,
    temperature: Tensor,
    form: LogitForm = PLAIN,
    compute_dtype: torch.dtype | None = None,
    vocabulary: VocabularySlice | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> Tensor:
    """Return log softmax(logits / temperature) at the target of each row.

    Args:
        hidden: [tokens, width]; weight: [vocabulary, width]; bias: [vocabulary]; the others [tokens].
        form: makes the logits of hidden @ weight.T + bias.
        compute_dtype: of matrix products; None: that of ``weight``. Softmax and sums are float32 at least.
        vocabulary: the slice that ``weight`` and ``bias`` have the rows of; None: all of it.
        chunk_logits: logits in memory at once, at most; one row's always are.

    Returns:
        [tokens], nats, float32 at least; carries the gradient of ``hidden``, ``weight`` and ``bias``.
    """
    rows = max(1, chunk_logits // weight.shape[0] // (1 if form.cap is None else 2))
    dtype = compute_dtype or weight.dtype
    temperature = temperature.to(_wide(hidden.dtype))
    if form.cap is None:
        divisor, height = temperature / form.scale, None
    else:
        divisor, height = torch.full_like(temperature, form.cap / form.scale), form.cap / temperature
    logprob: Tensor = _TokenLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target_ids, divisor, height, dtype, vocabulary, rows
    )
    return logprob


class _TokenLogprob(torch.autograd.Function):
    """Takes the softmax of z = (hidden @ weight.T + bias) / divisor; with a height, of height * tanh(z).

    Both are [tokens].
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        divisor: Tensor,
        height: Tensor | None,
        dtype: torch.dtype,
        vocabulary: VocabularySlice | None,
        rows: int,
    ) -> Tensor:
        head, scaled = weight.to(dtype), (hidden / divisor[:, None]).to(dtype)
        buffer, parts = _buffer(scaled, head, rows, is_capped=height is not None), _parts(len(scaled), rows)
        chosen = []
        for part in parts:
            logits = _write_logits(buffer, scaled, head, bias, divisor, height, part)
            if vocabulary is None:
                torch.log_softmax(logits, dim=-1, out=logits)
                chosen.append(logits.gather(-1, target_ids[part, None]).squeeze(-1))
            else:
                chosen.append(_softmax_of_slice(logits, target_ids[part], vocabulary))
        ctx.dtype, ctx.rows, ctx.hidden_dtype, ctx.vocabulary = dtype, rows, hidden.dtype, vocabulary
        ctx.buffer = buffer
        ctx.save_for_backward(scaled, weight, bias, target_ids, divisor, height)
        return torch.cat(chosen)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scaled, weight, bias, target_ids, divisor, height = ctx.saved_tensors
        vocabulary: VocabularySlice | None = ctx.vocabulary
        head = weight.to(ctx.dtype)
        # Rows of the products' gradient are (one hot - softmax) * slope * height * gradient / divisor, of
        # which uncapped ones have no slope and height. The factors of rows are applied to the products'
        # narrow sides instead: one pass less over the logits.
        if height is not None:
            gradient = gradient * height
        weighed = (scaled * gradient[:, None]).to(ctx.dtype)
        to_products = gradient / divisor
        to_hidden = torch.empty(scaled.shape, dtype=gradient.dtype, device=scaled.device)
        to_weight = torch.zeros_like(weight)
        to_bias = None if bias is None else torch.zeros_like(bias)
        buffer, ctx.buffer = ctx.buffer, None
        is_kept = buffer is not None
        if buffer is None:  # a second backward pass: the first has used it up
            buffer = _buffer(scaled, head, ctx.rows, is_capped=height is not None)
        for part in reversed(_parts(len(scaled), ctx.rows)):
            if is_kept:
                softmax = buffer[0, : len(scaled[part])]
                if vocabulary is None:
                    softmax.exp_()
                is_kept = False
            else:
                softmax = _write_logits(buffer, scaled, head, bias, divisor, height, part)
                if vocabulary is None:
                    torch.softmax(softmax, dim=-1, out=softmax)
                else:
                    _softmax_of_slice(softmax, target_ids[part], vocabulary)
            if vocabulary is None:
                softmax.scatter_add_(-1, target_ids[part, None], softmax.new_full((len(softmax), 1), -1.0))
            else:
                place, is_here = vocabulary.place(target_ids[part])
                softmax.scatter_add_(-1, place[:, None], -is_here[:, None].to(softmax.dtype))
            if height is not None:
                softmax *= buffer[1, : len(softmax)]
            narrow = softmax.to(ctx.dtype)
            to_hidden[part] = narrow @ head
            if ctx.dtype == weight.dtype:
                to_weight.addmm_(narrow.T, weighed[part], alpha=-1)
            else:
                to_weight -= narrow.T @ weighed[part]
            if to_bias is not None:
                to_bias -= to_products[part] @ softmax
        to_hidden.mul_(-to_products[:, None])
        if vocabulary is not None:
            vocabulary.ranks.add_up(to_hidden)
        return to_hidden.to(ctx.hidden_dtype), to_weight, to_bias, None, None, None, None, None, None


def _softmax_of_slice(logits: Tensor, target_ids: Tensor, vocabulary: VocabularySlice) -> Tensor:
    """Turn a slice's logits into its part of the softmax, in place; return the targets' logprobs."""
    largest = logits.amax(dim=-1)
    vocabulary.ranks.take_largest(largest)
    logits -= largest[:, None]
    place, is_here = vocabulary.place(target_ids)
    chosen = torch.where(is_here, logits.gather(-1, place[:, None]).squeeze(-1), 0.0)
    sums = torch.stack([chosen, logits.exp_().sum(dim=-1)])
    vocabulary.ranks.add_up(sums)
    logits /= sums[1, :, None]
    return sums[0] - sums[1].log()


def _parts(tokens: int, rows: int) -> list[slice]:
    """Cut from the end, so that the last part, which stays in the buffer, fills it."""
    return [slice(max(0, end - rows), end) for end in range(max(tokens, 1), 0, -rows)][::-1]


def _buffer(scaled: Tensor, head: Tensor, rows: int, *, is_capped: bool) -> Tensor:
    """Return room for logits, and for slopes where they are capped: [1 or 2, rows, vocabulary]."""
    shape = (1 + is_capped, min(rows, len(scaled)), len(head))
    return torch.empty(shape, dtype=_wide(scaled.dtype), device=scaled.device)


def _write_logits(
    buffer: Tensor,
    scaled: Tensor,
    head: Tensor,
    bias: Tensor | None,
    divisor: Tensor,
    height: Tensor | None,
    part: slice,
) -> Tensor:
    """Write a part's logits, and slopes where they are capped, into the buffer; return the logits there."""
    scaled = scaled[part]
    logits = buffer[0, : len(scaled)]
    if logits.dtype == head.dtype:
        torch.mm(scaled, head.T, out=logits)
    else:
        logits.copy_(scaled @ head.T)
    if bias is not None:
        logits.addr_(1 / divisor[part], bias.to(logits.dtype))
    if height is not None:
        slopes = buffer[1, : len(scaled)]
        torch.mul(logits.tanh_(), logits, out=slopes).neg_().add_(1)
        logits *= height[part, None]
    return logits


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
