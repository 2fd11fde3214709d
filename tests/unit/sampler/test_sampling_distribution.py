import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.objective.truncation import least_kept_mass
from node.rollout import SamplingParameters
from sampler.engines.decoding.sampling import Distribution, RowSampling, sampling_distribution

PLAIN = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1)


def distribution_of(logits: Tensor, **sampling: Any) -> Distribution:
    return sampling_distribution(logits[None], rows(replace(PLAIN, **sampling)))


def rows(*sampling: SamplingParameters) -> RowSampling:
    return RowSampling.of(sampling, device=torch.device("cpu"))


def logprob_of(probabilities: list[float], **sampling: float) -> Tensor:
    return distribution_of(torch.tensor(probabilities).log(), **sampling).logprob[0]


def kept_mass_of(probabilities: list[float], **sampling: float) -> float:
    return distribution_of(torch.tensor(probabilities).log(), **sampling).kept_mass.item()


def test_without_truncation_it_is_the_softmax() -> None:
    assert logprob_of([0.5, 0.3, 0.2]).exp().tolist() == pytest.approx([0.5, 0.3, 0.2])


def test_a_temperature_of_one_half_squares_the_probabilities() -> None:
    # 0.25, 0.09, 0.04 over 0.38
    expected = [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]
    assert logprob_of([0.5, 0.3, 0.2], temperature=0.5).exp().tolist() == pytest.approx(expected)


def test_top_k_keeps_the_k_likeliest_and_renormalises() -> None:
    assert logprob_of([0.2, 0.5, 0.3], top_k=2).exp().tolist() == pytest.approx([0, 0.625, 0.375])


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    # 0.5 alone does not reach 0.6; 0.5 + 0.3 does.
    assert logprob_of([0.2, 0.5, 0.3], top_p=0.6).exp().tolist() == pytest.approx([0, 0.625, 0.375])


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    # After top-k 2: 0.625, 0.375. The first alone reaches 0.6.
    assert logprob_of([0.2, 0.5, 0.3], top_k=2, top_p=0.6).exp().tolist() == pytest.approx([0, 1, 0])


def test_min_p_cuts_off_what_is_less_likely_than_its_share_of_the_likeliest() -> None:
    # Kept is what has 0.5 * 0.5 at least: 0.5 and 0.3, which hold 0.8.
    assert logprob_of([0.2, 0.5, 0.3], min_p=0.5).exp().tolist() == pytest.approx([0, 0.625, 0.375])
    assert kept_mass_of([0.2, 0.5, 0.3], min_p=0.5) == pytest.approx(0.8)


def test_min_p_of_one_keeps_the_likeliest_token_and_its_equals() -> None:
    assert logprob_of([0.25, 0.25, 0.5], min_p=1.0).tolist() == [-math.inf, -math.inf, 0.0]
    assert logprob_of([0.25, 0.375, 0.375], min_p=1.0).exp().tolist() == pytest.approx([0, 0.5, 0.5])


def test_min_p_is_measured_after_temperature() -> None:
    # 0.25, 0.09, 0.04 over 0.38: the second has 0.36 of the first, where it had 0.6.
    assert kept_mass_of([0.5, 0.3, 0.2], temperature=0.5, min_p=0.4) == pytest.approx(0.25 / 0.38)


def test_top_p_counts_the_mass_that_min_p_left() -> None:
    # Alone, 0.4 + 0.3 is what reaches 0.55. After min-p 0.7, which leaves 0.4 / 0.7 = 0.571, 0.4 does.
    assert kept_mass_of([0.4, 0.3, 0.2, 0.1], top_p=0.55) == pytest.approx(0.7)
    assert kept_mass_of([0.4, 0.3, 0.2, 0.1], min_p=0.7, top_p=0.55) == pytest.approx(0.4)


def test_a_tiny_nucleus_keeps_the_likeliest_token() -> None:
    assert logprob_of([0.2, 0.5, 0.3], top_p=1e-9).tolist() == [-math.inf, 0.0, -math.inf]


def test_top_k_of_one_among_equals_keeps_the_smallest_id() -> None:
    assert logprob_of([0.25, 0.25, 0.25, 0.25], top_k=1).exp().tolist() == [1, 0, 0, 0]


def test_rows_are_truncated_each_by_their_own_parameters() -> None:
    logprob, kept_mass = sampling_distribution(
        torch.tensor([[0.5, 0.3, 0.2]] * 3).log(),
        rows(PLAIN, replace(PLAIN, top_k=1), replace(PLAIN, min_p=0.5)),
    )
    assert kept_mass.tolist() == pytest.approx([1, 0.5, 0.8])
    assert logprob[0].exp().tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert logprob[1].exp().tolist() == [1, 0, 0]
    assert logprob[2].exp().tolist() == pytest.approx([0.625, 0.375, 0])


def test_without_truncation_the_whole_mass_is_kept() -> None:
    assert kept_mass_of([0.2, 0.5, 0.3], temperature=0.3) == 1.0


def test_the_kept_mass_is_the_share_of_the_softmax_that_the_tokens_left_hold() -> None:
    assert kept_mass_of([0.2, 0.5, 0.3], top_k=2) == pytest.approx(0.8)
    assert kept_mass_of([0.2, 0.5, 0.3], top_p=0.6) == pytest.approx(0.8)
    # Not 0.625, which is what the nucleus holds of what top-k left.
    assert kept_mass_of([0.2, 0.5, 0.3], top_k=2, top_p=0.6) == pytest.approx(0.5)


def test_the_kept_mass_is_measured_after_temperature() -> None:
    # 0.25, 0.09, 0.04 over 0.38
    assert kept_mass_of([0.5, 0.3, 0.2], temperature=0.5, top_k=2) == pytest.approx(0.34 / 0.38)


@settings(deadline=None)
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
