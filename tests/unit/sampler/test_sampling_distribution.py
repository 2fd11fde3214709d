import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.objective.formulas.truncation import least_kept_mass
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.decoding.sampling import Distribution, RowSampling, sampling_distribution

PLAIN = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1)


def distribution_of(logits: Tensor, **sampling: Any) -> Distribution:
    return sampling_distribution(logits[None], rows(replace(PLAIN, **sampling)))


def rows(*sampling: SamplingParameters) -> RowSampling:
    return RowSampling.of(sampling, device=torch.device("cpu"))


THREE, SORTED, EQUAL = [0.2, 0.5, 0.3], [0.5, 0.3, 0.2], [0.25] * 4


@pytest.mark.parametrize(
    ("probabilities", "sampling", "expected", "mass"),
    [
        pytest.param(SORTED, {}, SORTED, 1, id="without truncation it is the softmax"),
        # 0.25, 0.09, 0.04 over 0.38
        pytest.param(SORTED, {"temperature": 0.5}, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38], 1, id="tempered"),
        pytest.param(
            SORTED, {"temperature": 0.5, "top_k": 2}, [0.25 / 0.34, 0.09 / 0.34, 0], 0.34 / 0.38,
            id="the kept mass is measured after temperature",
        ),
        pytest.param(THREE, {"top_k": 2}, [0, 0.625, 0.375], 0.8, id="top-k keeps the k likeliest"),
        pytest.param(EQUAL, {"top_k": 1}, [1, 0, 0, 0], 0.25, id="top-k of equals keeps the smallest id"),
        # 0.5 alone does not reach 0.6; 0.5 + 0.3 does.
        pytest.param(THREE, {"top_p": 0.6}, [0, 0.625, 0.375], 0.8, id="top-p keeps what crosses the mass"),
        pytest.param(THREE, {"top_p": 1e-9}, [0, 1, 0], 0.5, id="a tiny nucleus keeps the likeliest"),
        # After top-k 2: 0.625, 0.375. The first alone reaches 0.6; of the whole softmax it is 0.5.
        pytest.param(THREE, {"top_k": 2, "top_p": 0.6}, [0, 1, 0], 0.5, id="top-p counts what top-k left"),
        # Kept is what has 0.5 * 0.5 at least.
        pytest.param(THREE, {"min_p": 0.5}, [0, 0.625, 0.375], 0.8, id="min-p is a share of the likeliest"),
        pytest.param([0.25, 0.25, 0.5], {"min_p": 1.0}, [0, 0, 1], 0.5, id="min-p of one"),
        pytest.param([0.25, 0.375, 0.375], {"min_p": 1.0}, [0, 0.5, 0.5], 0.75, id="and its equals"),
        # 0.25, 0.09, 0.04 over 0.38: the second has 0.36 of the first, where it had 0.6.
        pytest.param(
            SORTED, {"temperature": 0.5, "min_p": 0.4}, [1, 0, 0], 0.25 / 0.38, id="min-p after temperature"
        ),
        # Alone, 0.4 + 0.3 is what reaches 0.55. After min-p 0.7, which leaves 0.4 / 0.7 = 0.571, 0.4 does.
        pytest.param([0.4, 0.3, 0.2, 0.1], {"top_p": 0.55}, [4 / 7, 3 / 7, 0, 0], 0.7, id="top-p alone"),
        pytest.param(
            [0.4, 0.3, 0.2, 0.1], {"min_p": 0.7, "top_p": 0.55}, [1, 0, 0, 0], 0.4,
            id="top-p counts what min-p left",
        ),
    ],
)  # fmt: skip
def test_what_is_kept_is_renormalised_and_its_mass_recorded(
    probabilities: list[float], sampling: dict[str, Any], expected: list[float], mass: float
) -> None:
    logprob, kept_mass = distribution_of(torch.tensor(probabilities).log(), **sampling)
    assert logprob[0].exp().tolist() == pytest.approx(expected)
    assert [p == -math.inf for p in logprob[0].tolist()] == [p == 0 for p in expected]
    assert kept_mass.item() == pytest.approx(mass)


def test_rows_are_truncated_each_by_their_own_parameters() -> None:
    logprob, kept_mass = sampling_distribution(
        torch.tensor([[0.5, 0.3, 0.2]] * 3).log(),
        rows(PLAIN, replace(PLAIN, top_k=1), replace(PLAIN, min_p=0.5)),
    )
    assert kept_mass.tolist() == pytest.approx([1, 0.5, 0.8])
    assert logprob[0].exp().tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert logprob[1].exp().tolist() == [1, 0, 0]
    assert logprob[2].exp().tolist() == pytest.approx([0.625, 0.375, 0])


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_the_distribution_is_normalised_and_never_empty(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    whole = distribution_of(torch.tensor(logits), temperature=temperature).logprob[0]
    distribution = distribution_of(
        torch.tensor(logits), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    logprob, kept_mass = distribution.logprob[0], distribution.kept_mass
    assert logprob.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert logprob.max().item() > -math.inf
    is_kept = logprob > -math.inf
    if top_k:
        assert int(is_kept.sum()) <= top_k
    assert 0 < kept_mass.item() <= 1
    assert torch.allclose((logprob + kept_mass.log())[is_kept], whole[is_kept], atol=1e-5)
    floor = least_kept_mass(min_p=min_p, top_p=top_p, top_k=top_k, vocabulary_size=len(logits))
    assert kept_mass.item() >= floor * (1 - 1e-5)
