"""The one place where a log ratio is held before it is exponentiated."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from learner.objective.formulas.log_ratio import LARGEST_LOG_RATIO, bounded, bounded_ratio, is_beyond_bound
from node.values.limits import REWARD
from support.objective_batches import batch_of, made_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_is_whole_up_to_the_bound_and_held_beyond(dtype: torch.dtype) -> None:
    largest = LARGEST_LOG_RATIO[dtype]
    log_ratio = torch.tensor(
        [-1e4, 0.0, 3.0, largest, largest + 1, 5e5, math.inf], dtype=dtype
    ).requires_grad_()
    ratio = bounded_ratio(log_ratio)
    expected = [0.0, 1.0, math.exp(3), *[math.exp(largest)] * 4]
    torch.testing.assert_close(ratio.detach(), torch.tensor(expected, dtype=dtype))
    assert bounded(log_ratio)[:3].tolist() == [-1e4, 0.0, 3.0]
    assert is_beyond_bound(log_ratio).tolist() == [False] * 4 + [True] * 3
    (gradient,) = torch.autograd.grad(ratio.sum(), log_ratio)
    torch.testing.assert_close(gradient, torch.tensor([*expected[:4], 0, 0, 0], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squares_and_products_of_ratios_stay_in_range(dtype: torch.dtype) -> None:
    """As a gradient norm squares them: one with the largest reward, two with the largest standardised one."""
    ratio = bounded_ratio(torch.full((2,), math.inf, dtype=dtype))
    assert bool(((ratio * REWARD) ** 2 * 1e6).isfinite().all())
    assert bool(((ratio.prod() * math.sqrt(64)) ** 2).isfinite())


@pytest.mark.parametrize("name", ["learner_logprob", "behaviour_logprob", "proximal_logprob"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_batch_of_narrow_logprobs_is_refused_by_name(name: str, dtype: torch.dtype) -> None:
    p, sample = made_up(1)
    batch = batch_of(p, sample)
    narrow: dict[str, Any] = {name: batch.learner_logprob.detach().to(dtype)}
    with pytest.raises(ValueError, match=f"{name} has the type {dtype}.*take the log softmax in float32"):
        replace(batch, **narrow)
