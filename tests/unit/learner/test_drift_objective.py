"""The default objective sees how old its tokens are, and pushes nothing that the reward does not ask for."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from learner.objective.formulas.trust_regions import has_moved, largest_move
from learner.objective.registry import load_objective
from support.made_up_groups import gradient_of as gradient_step
from support.made_up_groups import made_up_groups, nearby, shared_policy
from support.objective_batches import batch_of, gradient_of, made_up, whole_rows
from support.step_settings import make_step_settings


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5])
def test_the_gauge_counts_the_tokens_of_completions_whose_weight_was_cut_to_one(spread: float) -> None:
    """One that is left alone has no weight to cut."""
    p, sample = made_up(5, spread=spread)
    batch = batch_of(p, replace(sample, staleness=[64] * len(p)))
    outcome = load_objective("drift_aware")(batch)
    assert outcome.is_truncated is not None
    whole = batch.token_mean(batch.log_ratio.detach()).exp()
    cut = ((whole > outcome.weight * (1 + 1e-12)) & ~outcome.is_clipped)[:, None] & batch.mask
    assert torch.equal(outcome.is_truncated, cut)
    assert (int(cut.sum()) > 0) == (spread > 0)


def test_two_completions_of_one_token_by_hand() -> None:
    """q = (.2, .8), p = (.4, .4): p/q = (2, 1/2); at age 300 a completion may move by .5."""
    p, q = (column(*values).log()[:, None] for values in ((0.4, 0.4), (0.2, 0.8)))
    batch = whole_rows(p, q, column(0, 1), staleness=300)
    outcome = load_objective("drift_aware")(batch)
    assert outcome.weight.tolist() == pytest.approx([1, 0.5], rel=1e-9)
    assert not outcome.is_clipped.any()
    # The other way round both have moved by ln 2 > .5 as they are pushed.
    swapped = load_objective("drift_aware")(replace(batch, reward=column(1, 0)))
    assert swapped.is_clipped.all()
    assert float(swapped.loss.detach()) == 0


def test_tokens_that_decide_nothing_cancel_over_all_orders_of_the_rewards() -> None:
    """The rewards have nothing to do with the tokens; a weight that depends on the advantage pushes still."""
    generator = torch.Generator().manual_seed(5)
    q = -torch.empty(4, 6, dtype=torch.float64).exponential_(generator=generator)
    p = (q + 0.3 * torch.randn(q.shape, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    pushes = {}
    wide = {"most_nats": 9.0, "move_nats": 9.0}
    for name, options in (("drift_aware", wide), ("topr", {}), ("grpo", {}), ("version_aware_kl", {})):
        total = torch.zeros_like(q)
        for reward in itertools.permutations((0.0, 0.0, 1.0, 1.0)):
            batch = whole_rows(p, q, column(*reward), staleness=64)
            total += gradient_of(load_objective(name, options)(batch).loss, batch)
        pushes[name] = float(total.abs().max())
    assert pushes.pop("drift_aware") < 1e-12
    assert min(pushes.values()) > 1e-3


def test_the_trust_region_grows_with_the_root_of_the_age() -> None:
    limit = largest_move(torch.tensor([0, 1, 4, 100, 1000]), per_root_version=0.03, most_nats=0.5)
    torch.testing.assert_close(limit, column(0.03, 0.03, 0.06, 0.3, 0.5))


def test_a_completion_has_moved_only_the_way_it_is_pushed_and_outliers_hardly_count() -> None:
    log_ratio = torch.stack([column(0.3, 0.3), column(0.3, 0.3), column(-0.3, -0.3), column(30, -0.1)])
    mask = torch.ones(4, 2, dtype=torch.bool)
    moved = has_moved(log_ratio, mask, column(1, -1, -1, 1), limit=column(0.2, 0.2, 0.2, 1.0))
    assert moved.tolist() == [True, False, True, False]


def test_a_step_says_how_much_was_truncated(model_dir: Path) -> None:
    policy = shared_policy(model_dir)
    groups = nearby(made_up_groups(5), policy)
    _, outcome = gradient_step(policy, groups, make_step_settings(objective="drift_aware"))
    assert outcome.numbers.truncated_fraction is not None
    assert 0 < outcome.numbers.truncated_fraction < 1
    _, outcome = gradient_step(policy, groups, make_step_settings(objective="gepo"))
    assert outcome.numbers.truncated_fraction is None
