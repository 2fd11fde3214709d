"""No objective returns a number that is not finite, whatever admission lets in, in either precision."""

import math
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch

from learner.intake.group_verdict import LEAST_LOGPROB
from learner.objective.batch import ObjectiveBatch
from learner.objective.menu import MENU
from learner.objective.registry import Objective, load_objective
from learner.step.step_loss import StepLoss
from node.values.limits import REWARD

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "clip_low": [{"clip_low": 1.0, "clip_high": math.inf}, {"dual_clip": 3.0}],
    "move_nats": [{"move_nats": 1e9, "most_nats": 1e9}, {"move_nats": 1e-9, "most_nats": 1e-9}],
    "divides_by_deviation": [{"divides_by_deviation": False}],
    "gate": [{"gate": "always"}, {"gate": "none", "power": 0.5}],
    "threshold_nats": [{"threshold_nats": 0.0}, {"threshold_nats": math.inf}],
    "is_length_normalised": [{"is_length_normalised": True}],
    "ceiling": [{"ceiling": math.inf}],
    "most": [{"least": 0.0, "most": math.inf}, {"veto": 1e-4}],
    "behaviour_cap": [{"behaviour_cap": 5.0}, {"behaviour_cap": 5.0, "beyond_cap": "truncate"}],
    "proximal": [{"proximal": "log_linear"}],
    "rate_bad": [{"rate_good": 50.0, "rate_bad": 50.0}],
    "overlong_buffer_share": [{"drops_uninformative": False, "overlong_buffer_share": 0.0}],
}
"""Options far from their defaults, infinities included, by an option that the objective must have."""


def variants() -> list[Objective]:
    found = []
    for name, entry in MENU.items():
        known = entry.options.model_fields
        found.append(load_objective(name))
        found += [
            load_objective(name, options)
            for field, several in OPTIONS.items()
            for options in several
            if field in known and all(option in known for option in options)
        ]
    return found


VARIANTS = variants()
each_variant = pytest.mark.parametrize(
    "objective", VARIANTS, ids=[f"{each.name}-{each.options!r}"[:80] for each in VARIANTS]
)
DTYPES = (torch.float32, torch.float64)
Pair = tuple[float, float]
CORNERS = ((0.0, LEAST_LOGPROB), (-1e4, 0.0), (-1e4, LEAST_LOGPROB), (0.0, 0.0), (-8.0, -1.0), (-1.0, -8.0))
"""Learner and behaviour logprobs of tokens that admission lets in: a learner's may be anything below 0."""
SETS = tuple(pairs for several in range(1, 5) for pairs in combinations(CORNERS, several))
DIRECT = ((0.0, -1e4), (-1e4, -1e4), (-1.0, -1e4), (-1e4, -1.0))
"""Beyond admission: what a caller of the formulas may hand over."""


def check_finite(objective: Objective, batch: ObjectiveBatch) -> None:
    loss = StepLoss(
        objective, kl_coefficient=0.005, reference_kl_coefficient=0.01, discounts_by_sample_size=True
    )
    outcome = loss(batch)
    (gradient,) = torch.autograd.grad(outcome.loss, batch.learner_logprob)
    said = f"{objective.name} {objective.options}"
    assert bool(outcome.loss.isfinite()), f"{said}: the loss is {outcome.loss.item()}"
    assert bool(gradient.isfinite().all()), f"{said}: not all of the gradient"
    assert math.isfinite(float(torch.linalg.vector_norm(gradient))), f"{said}: a norm beyond float"
    assert outcome.reference_kl_nats is not None
    for numbers in (outcome.objective.weight, outcome.kl_nats, outcome.reference_kl_nats):
        assert bool(numbers.isfinite().all()), objective.name


@cache
def extreme_batch(
    sets: tuple[tuple[Pair, ...], ...], *, tokens: int, dtype: torch.dtype, scale: float = 1.0, rows: int = 8
) -> ObjectiveBatch:
    """Return groups of four for each set of corners, at which their tokens, or whole completions, are."""
    generator = torch.Generator().manual_seed(tokens)
    learner, behaviour, proximal, reference = (torch.zeros(0, tokens, dtype=dtype) for _ in range(4))
    for pairs in sets:
        corner = torch.tensor(pairs, dtype=dtype)
        index = torch.randint(len(pairs), (3, rows, tokens), generator=generator)
        index[0, :3] = index[0, :3, :1]  # three completions all of one kind
        learner = torch.cat([learner, corner[index[0], 0]])
        behaviour = torch.cat([behaviour, corner[index[0], 1]])
        proximal = torch.cat([proximal, corner[index[1], 0]])
        reference = torch.cat([reference, corner[index[2], 1]])
    count = rows * len(sets)
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (count, 1), generator=generator)
    mask[::rows] = True
    return ObjectiveBatch(
        learner_logprob=learner.requires_grad_(),
        behaviour_logprob=behaviour,
        mask=mask,
        group_index=torch.arange(count) // 4,
        reward=scale * torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 1], dtype=torch.float64)[:rows].repeat(len(sets)),
        staleness_versions=torch.randint(0, 300, (count,), generator=generator),
        max_tokens=tokens,
        proximal_logprob=proximal,
        reference_logprob=reference,
    )


@each_variant
def test_every_admitted_input_has_a_finite_loss_and_gradient(objective: Objective) -> None:
    """Any up to four corners, side by side; and each alone, where nothing else spreads the batch."""
    for dtype, scale in ((torch.float32, 1.0), (torch.float32, REWARD), (torch.float64, REWARD)):
        check_finite(objective, extreme_batch(SETS, tokens=40, dtype=dtype, scale=scale))
    for number, pair in enumerate(CORNERS):
        check_finite(objective, extreme_batch(((pair,),), tokens=1 + number, dtype=DTYPES[number % 2]))


@each_variant
def test_the_longest_completions_have_finite_losses_and_gradients(objective: Objective) -> None:
    """16 384 tokens: their log ratios add up to 491 520 nats one way and 1.6e8 the other."""
    for dtype in DTYPES:
        check_finite(objective, extreme_batch((CORNERS,), tokens=16_384, dtype=dtype, rows=4))


@each_variant
def test_inputs_that_admission_refuses_are_finite_too(objective: Objective) -> None:
    sets = tuple((*DIRECT[:several], (-1.0, -1.0)) for several in range(1, 1 + len(DIRECT)))
    for dtype in DTYPES:
        check_finite(objective, extreme_batch(sets, tokens=9, dtype=dtype))
        check_finite(objective, extreme_batch(sets[:1], tokens=1, dtype=dtype))
