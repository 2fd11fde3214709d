import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.intake.group_verdict import full_logprobs
from learner.model.micro_batches import objective_batch
from learner.objective.formulas.truncation import least_kept_mass, untruncated_logprob
from support.groups import SAMPLING, make_completion, make_group


@pytest.mark.parametrize("kept_mass", [0.965, 0.895])
def test_on_policy_a_corrected_ratio_is_one_and_an_uncorrected_one_the_kept_mass(kept_mass: float) -> None:
    """0.965: measured at top-k 20; 0.895: at top-p 0.8 and top-k 1024 (shared facts, objectives)."""
    learner = torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64).log()
    sampled = (torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64) / kept_mass).log()
    corrected = untruncated_logprob(sampled, torch.full_like(sampled, kept_mass))
    assert (learner - sampled).exp().tolist() == pytest.approx([kept_mass] * 3, abs=1e-12)
    assert (learner - corrected).exp().tolist() == pytest.approx([1.0] * 3, abs=1e-12)


def test_the_correction_is_exact_where_everything_was_kept_and_finite_at_the_smallest_mass() -> None:
    logprob = torch.tensor([-0.5, -3.0])
    assert untruncated_logprob(logprob, torch.ones(2)).tolist() == logprob.tolist()
    assert untruncated_logprob(logprob, torch.full((2,), 1e-45)).isfinite().all()


def test_columns_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="kept_mass"):
        untruncated_logprob(torch.zeros(3), torch.ones(2))


@pytest.mark.parametrize(
    ("min_p", "top_p", "top_k", "least"),
    [
        (0.0, 1.0, 0, 1.0),
        (0.0, 0.8, 0, 0.8),
        (0.0, 1.0, 20, 0.2),
        (0.0, 0.8, 20, 0.16),
        (0.0, 0.8, 1000, 0.8),
        (1.0, 1.0, 0, 0.01),
        (1.0, 1.0, 20, 0.01),
        (0.1, 1.0, 0, 1 / 10.9),
        (0.1, 0.5, 0, 0.5 / 10.9),
        (0.1, 1.0, 5, 0.05),
    ],
)
def test_no_softmax_can_be_cut_to_less_than_the_least_kept_mass(
    min_p: float, top_p: float, top_k: int, least: float
) -> None:
    possible = least_kept_mass(min_p=min_p, top_p=top_p, top_k=top_k, vocabulary_size=100)
    assert possible == pytest.approx(least)


def test_only_renormalised_logprobs_are_corrected_on_their_way_to_the_objective() -> None:
    completions = tuple(make_completion(n, kept_mass=np.full(n, 0.8, np.float32)) for n in (2, 4))
    sampling = replace(SAMPLING, top_p=0.8)
    cut = make_group(completions=completions, sampling=sampling)
    batch = objective_batch(
        [make_group(), cut],
        version=0,
        discount=lambda _: 1.0,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert set(batch.behaviour_logprob[:2][batch.mask[:2]].tolist()) == {-0.5}
    assert batch.behaviour_logprob[2:][batch.mask[2:]].tolist() == pytest.approx([-0.5 + math.log(0.8)] * 6)


def test_renormalised_logprobs_without_kept_masses_never_pass_for_others() -> None:
    group = make_group(sampling=replace(SAMPLING, top_k=5))
    with pytest.raises(ValueError, match="no kept masses"):
        full_logprobs(group)
