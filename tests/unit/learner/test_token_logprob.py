"""Logprobs in chunks against the whole softmax at once, values and gradients."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, get_ident
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from learner.model.logit_form import LogitForm
from learner.model.token_logprob import Reduction, VocabularySlice, token_logprob

TOKENS, WIDTH, VOCABULARY = 11, 6, 17


Made = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]
"""Hidden states, weight and bias of the head, targets, temperatures."""


def made_up(dtype: torch.dtype = torch.float64, *, has_bias: bool = False) -> Made:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    target = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    temperature = 0.5 + torch.rand(TOKENS, generator=generator, dtype=torch.float64).to(dtype)
    return (
        normal(TOKENS, WIDTH),
        normal(VOCABULARY, WIDTH),
        normal(VOCABULARY) if has_bias else None,
        target,
        temperature,
    )


def scored(made: Made, **options: Any) -> Tensor:
    hidden, weight, bias, target, temperature = made
    return token_logprob(hidden, weight, bias, target_ids=target, temperature=temperature, **options)


FORMS = [LogitForm(), LogitForm(scale=0.0625), LogitForm(cap=2.0), LogitForm(scale=3.0, cap=1.5)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk_logits", [1, 3 * VOCABULARY + 5, TOKENS * VOCABULARY])
def test_no_chunk_size_changes_values_or_gradients(
    chunk_logits: int, has_bias: bool, form: LogitForm
) -> None:
    made = made_up(has_bias=has_bias)
    hidden, weight, bias, target, temperature = made
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    upstream = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)

    logits = form.logits(torch.nn.functional.linear(hidden, weight, bias)) / temperature[:, None]
    expected = torch.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0]
    actual = scored(made, form=form, chunk_logits=chunk_logits)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(one, leaves, upstream) for one in (actual, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


class AllRanks:
    """Exchanges with ranks that are threads of this process and come to each exchange together."""

    def __init__(self, ranks: int) -> None:
        self._meeting = Barrier(ranks, timeout=30)
        self._given: dict[int, Tensor] = {}

    def add_up(self, values: Tensor) -> None:
        values.copy_(self._exchanged(values).sum(dim=0))

    def take_largest(self, values: Tensor) -> None:
        values.copy_(self._exchanged(values).amax(dim=0))

    def _exchanged(self, values: Tensor) -> Tensor:
        self._given[get_ident()] = values.clone()
        self._meeting.wait()
        given = torch.stack(list(self._given.values()))
        self._meeting.wait()
        return given


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("chunk_logits", [3 * VOCABULARY, 1 << 20])
def test_ranks_with_slices_of_the_vocabulary_have_the_values_and_gradients_of_one(
    chunk_logits: int, form: LogitForm
) -> None:
    hidden, weight, bias, target, temperature = made_up(has_bias=True)
    assert bias is not None
    weight, bias = weight[:16].detach().requires_grad_(), bias[:16].detach().requires_grad_()
    target = target % 16
    upstream = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)

    def with_gradients(slice_: VocabularySlice | None, rows: slice) -> tuple[Tensor, ...]:
        h, w, b = (one.detach().requires_grad_() for one in (hidden, weight[rows], bias[rows]))
        own = (h, w, b, target, temperature)
        logprob = scored(own, form=form, vocabulary=slice_, chunk_logits=chunk_logits)
        return logprob.detach(), *torch.autograd.grad(logprob, (h, w, b), upstream)

    ranks: Reduction = AllRanks(2)

    def of_rank(number: int) -> tuple[Tensor, ...]:
        return with_gradients(VocabularySlice(8 * number, 8, ranks), slice(8 * number, 8 * number + 8))

    logprob, to_hidden, to_weight, to_bias = with_gradients(None, slice(None))
    with ThreadPoolExecutor(2) as pool:
        for number, got in enumerate(pool.map(of_rank, range(2))):
            rows = slice(8 * number, 8 * number + 8)
            for one, other in zip(got, (logprob, to_hidden, to_weight[rows], to_bias[rows]), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_no_tokens_have_no_logprobs_and_no_gradient() -> None:
    hidden, weight, _, target, temperature = made_up()
    none = token_logprob(hidden[:0], weight, None, target_ids=target[:0], temperature=temperature[:0])
    assert none.shape == (0,)
    none.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("chunk_logits", [2 * VOCABULARY, 1 << 20])
def test_narrow_products_still_have_wide_sums(chunk_logits: int) -> None:
    made = made_up(torch.float32)
    exact = scored(made)
    narrow = scored(made, compute_dtype=torch.bfloat16, chunk_logits=chunk_logits)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, exact, rtol=0, atol=0.1)
    assert not torch.equal(narrow, exact)
    gradient, expected = (torch.autograd.grad(one.sum(), made[1])[0] for one in (narrow, exact))
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0.1)


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]])
    logprob = token_logprob(hidden, weight, None, target_ids=torch.tensor([0, 0]), temperature=torch.ones(2))
    assert logprob.tolist() == [0.0, -2e4]
    assert torch.autograd.grad(logprob.sum(), hidden)[0].isfinite().all()


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the most elements any operation made, and counts the rows that matrix products made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_elements = self.rows = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.most_elements = max(self.most_elements, tensor.numel())
        if func is torch.ops.aten.mm.out:
            self.rows += len(result)
        return result


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(cap=2.0)], ids=str)
@pytest.mark.parametrize("vocabulary", [500, 4000])
def test_no_more_logits_than_a_chunk_exist_at_once_whatever_the_vocabulary(
    vocabulary: int, form: LogitForm
) -> None:
    tokens, chunk = 200, 8000
    hidden, weight = (torch.randn(rows, 2, requires_grad=True) for rows in (tokens, vocabulary))
    target = torch.randint(vocabulary, (tokens,))
    with Watched() as watched:
        logprob = scored((hidden, weight, None, target, torch.ones(tokens)), form=form, chunk_logits=chunk)
        torch.autograd.grad(logprob.sum(), [hidden, weight])
    assert watched.most_elements == max(chunk, weight.numel())


@pytest.mark.parametrize(("chunk_rows", "again"), [(TOKENS, 0), (TOKENS - 1, 1), (7, TOKENS - 7), (1, 10)])
def test_a_full_chunk_of_logits_is_never_made_twice(chunk_rows: int, again: int) -> None:
    made = made_up()
    with Watched() as watched:
        torch.autograd.grad(scored(made, chunk_logits=chunk_rows * VOCABULARY).sum(), made[:2])
    assert watched.rows == TOKENS + again


def test_a_second_backward_pass_finds_the_same_gradient() -> None:
    """The first one has used up the chunk that was kept."""
    made = made_up()
    logprob = scored(made)
    first = torch.autograd.grad(logprob.sum(), made[:2], retain_graph=True)
    second = torch.autograd.grad(logprob.sum(), made[:2])
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
