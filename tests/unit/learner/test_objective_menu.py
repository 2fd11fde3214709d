"""Every objective of the menu against its twin in plain floats, and in every layout of a batch."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch

from learner.objective.formulas.advantage import standardised_advantage
from learner.objective.menu import MENU
from learner.objective.registry import Objective, load_objective
from support.objective_batches import batch_of, gradient_of, in_order, made_up
from support.objective_twins import TWINS, TWINS_WITH_OPTIONS, Rows, Sample, Twin

CASES = [*((name, load_objective(name), twin) for name, twin in TWINS.items())] + [
    (label, load_objective(name, options), twin)
    for label, (name, options, twin) in TWINS_WITH_OPTIONS.items()
]
each_case = pytest.mark.parametrize(
    ("objective", "twin"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)


def each_objective_but(*names: str) -> pytest.MarkDecorator:
    cases = [case for case in CASES if case[1].name not in names]
    return pytest.mark.parametrize("objective", [case[1] for case in cases], ids=[case[0] for case in cases])


each_objective = each_objective_but()
SPREADS = (0.0, 0.1, 0.5, 1.5)


def with_proximal(p: Rows, sample: Sample) -> Sample:
    random = Random(9)
    return replace(sample, proximal=[[x + random.gauss(0, 0.2) for x in row] for row in p])


def slope(twin: Twin, p: Rows, sample: Sample, i: int, t: int) -> float:
    """Differentiate by the five-point rule; what the formula freezes stays at ``p``."""

    def at(offset: float) -> float:
        moved = [list(row) for row in p]
        moved[i][t] += offset
        return twin(moved, p, sample)

    h = 1e-4
    return (at(-2 * h) - 8 * at(-h) + 8 * at(h) - at(2 * h)) / (12 * h)


@each_objective_but("eqp", "decoupled_ppo", "mis_geometric")
def test_the_clipped_share_is_what_has_no_gradient_of_the_rewards(objective: Objective) -> None:
    """By rows or by tokens, as the objective clips; where there is no advantage, nothing is clipped.

    Left out: those that drop tokens whatever the advantage, and eqp, whose denominator has a gradient.
    """
    for spread in SPREADS:
        p, sample = made_up(11, spread=spread)
        batch = batch_of(p, sample, pad_right=1)
        outcome = objective(batch)
        gradient = gradient_of(outcome.loss if outcome.taught is None else outcome.taught, batch)
        is_still = (gradient == 0) & batch.mask
        advantage = standardised_advantage(batch.reward, batch.groups)
        if outcome.is_clipped.ndim == 1:
            assert torch.equal(outcome.is_clipped, (gradient == 0).all(dim=1) & (advantage != 0)), spread
        else:
            assert torch.equal(outcome.is_clipped, is_still & (advantage != 0)[:, None]), spread


def test_every_objective_has_a_twin() -> None:
    assert TWINS.keys() == MENU.keys()


@each_case
def test_the_loss_is_the_formula(objective: Objective, twin: Twin) -> None:
    for spread in SPREADS:
        p, plain = made_up(3, spread=spread)
        for sample in (plain, with_proximal(p, plain)):
            loss = objective(batch_of(p, sample)).loss.item()
            assert math.isclose(loss, twin(p, p, sample), rel_tol=1e-11, abs_tol=1e-13), spread


@each_case
def test_the_gradient_is_that_of_the_formula_and_frozen_terms_have_none(
    objective: Objective, twin: Twin
) -> None:
    for spread in SPREADS[1:]:
        p, sample = made_up(4, spread=spread)
        sample = with_proximal(p, sample)
        batch = batch_of(p, sample)
        gradient = gradient_of(objective(batch).loss, batch)
        for i, row in enumerate(p):
            for t in range(len(row)):
                expected = slope(twin, p, sample, i, t)
                assert math.isclose(float(gradient[i, t]), expected, abs_tol=1e-8), (spread, i, t)
        assert (gradient[~batch.mask] == 0).all()


@each_objective
def test_padding_on_any_side_with_anything_in_it_changes_nothing(objective: Objective) -> None:
    """The shorter completions of the other batch are filled with what is no number."""
    p, sample = made_up(5)
    plain, padded = batch_of(p, sample), batch_of(p, sample, pad_left=2, pad_right=1, filling=math.inf)
    one, other = objective(plain), objective(padded)
    torch.testing.assert_close(other.loss, one.loss, rtol=1e-12, atol=1e-15)
    a, b = gradient_of(one.loss, plain), gradient_of(other.loss, padded)
    torch.testing.assert_close(b[padded.mask], a[plain.mask], rtol=1e-10, atol=1e-15)
    assert (b[~padded.mask] == 0).all()
    assert int(other.is_clipped.sum()) == int(one.is_clipped.sum())


@each_objective
def test_the_order_of_completions_and_groups_changes_nothing(objective: Objective) -> None:
    p, sample = made_up(6)
    batch = batch_of(p, sample)
    order = list(range(len(p)))
    Random(1).shuffle(order)
    shuffled = in_order(batch, order)
    one, other = objective(batch), objective(shuffled)
    torch.testing.assert_close(other.loss, one.loss, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(
        gradient_of(other.loss, shuffled), gradient_of(one.loss, batch)[order], rtol=1e-10, atol=1e-15
    )
    torch.testing.assert_close(other.weight[:, None].nan_to_num(), one.weight[order][:, None].nan_to_num())


@each_objective
def test_a_separable_gradient_depends_on_no_other_row_and_the_others_do(objective: Objective) -> None:
    p, sample = made_up(7)
    batch = batch_of(p, sample)
    expected = gradient_of(objective(batch).loss, batch)
    is_same = []
    for i in range(len(p)):
        others = batch.behaviour_logprob.clone()
        others[i] = batch.learner_logprob.detach()[i]
        alone = replace(batch, learner_logprob=others.requires_grad_())
        is_same.append(torch.allclose(gradient_of(objective(alone).loss, alone)[i], expected[i], rtol=1e-12))
    assert all(is_same) == objective.is_separable


@each_objective_but("dppo_tv", "dapo")  # which have penalties of their own
def test_equal_rewards_leave_no_gradient(objective: Objective) -> None:
    p, sample = made_up(8)
    batch = batch_of(p, replace(sample, reward=[0.3] * len(p)))
    assert (gradient_of(objective(batch).loss, batch) == 0).all()


@each_objective_but("eqp")  # whose rows share denominators that have a gradient
def test_the_outer_factor_multiplies_what_a_completion_counts(objective: Objective) -> None:
    p, sample = made_up(9)
    batch = batch_of(p, sample)
    factor = torch.linspace(0, 2, len(p), dtype=torch.float64)
    plain = gradient_of(objective(batch).loss, batch)
    discounted = gradient_of(objective(replace(batch, discount=factor)).loss, batch)
    torch.testing.assert_close(discounted, factor[:, None] * plain, rtol=1e-10, atol=1e-15)


@each_objective
def test_a_tokens_gradient_is_its_weight_times_what_all_tokens_of_its_completion_share(
    objective: Objective,
) -> None:
    """The advantage and the divisor."""
    for spread in SPREADS[1:]:
        p, sample = made_up(13, spread=spread)
        batch = batch_of(p, with_proximal(p, sample))
        outcome = objective(batch)
        gradient = gradient_of(outcome.loss if outcome.taught is None else outcome.taught, batch)
        columns = (batch.mask, outcome.is_clipped, outcome.weight)
        mask, is_clipped, weight = (one.reshape(len(p), -1).expand_as(gradient) for one in columns)
        for row, is_taught in enumerate(mask & ~is_clipped):
            shares = gradient[row, is_taught] / weight[row, is_taught]
            torch.testing.assert_close(shares, shares.mean().expand_as(shares), rtol=1e-9, atol=1e-15)


@each_objective_but("gepo", "gepo_mean", "eqp", "dg")
def test_on_policy_every_completion_counts_in_full(objective: Objective) -> None:
    """Not so in the family of GEPO, where it counts q_i / E, nor in that of DG, which looks at p alone."""
    p, sample = made_up(10)
    weight = objective(batch_of(p, replace(sample, q=p, staleness=[0] * len(p)))).weight
    torch.testing.assert_close(weight, torch.ones_like(weight), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["drift_aware", "version_aware", "version_aware_kl"])
def test_on_policy_the_version_aware_gradient_is_that_of_grpo(name: str) -> None:
    """Token weights and one weight a completion are one, where all are 1 and groups are of one size."""
    p, sample = made_up(12)
    sizes = replace(sample, q=p, group=[0] * 3 + [5] * 3 + [2] * 3, staleness=[0] * len(p))
    ours, theirs = batch_of(p, sizes), batch_of(p, sizes)
    gradient = gradient_of(load_objective(name)(ours).loss, ours)
    expected = gradient_of(load_objective("grpo")(theirs).loss, theirs)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    assert (gradient != 0).any()


@each_objective
def test_the_type_of_the_logprobs_is_the_type_of_the_gradient(objective: Objective) -> None:
    p, sample = made_up(11)
    exact = batch_of(p, sample)
    narrow = replace(
        exact,
        learner_logprob=exact.learner_logprob.detach().float().requires_grad_(),
        behaviour_logprob=exact.behaviour_logprob.float(),
    )
    gradient = gradient_of(objective(narrow).loss, narrow)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(
        gradient.double(), gradient_of(objective(exact).loss, exact), rtol=1e-4, atol=1e-6
    )
