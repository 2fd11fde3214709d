"""The laboratory itself: seeds apart, behaviour as old as it says, weights 1 on policy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.staleness_lab.cells import Cell, Setting
from bench.staleness_lab.methods import RECIPES, Method
from bench.staleness_lab.mismatch import MISMATCHES
from bench.staleness_lab.prices import Prices
from bench.staleness_lab.safes import Safes
from bench.staleness_lab.seeds import runs_at_once
from bench.staleness_lab.simulation import PolicyHistory, simulate

CELL = Cell("prices", "version_aware", Setting(), "", "fixed", 4, "none", 1e-2, (0, 1), 30)


@pytest.fixture(scope="module")
def prices() -> Prices:
    return Prices()


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_a_seed_runs_the_same_whichever_seeds_run_beside_it(prices: Prices, mismatch: str) -> None:
    for delay in ("fixed", "humps"):
        both = replace(CELL, delay=delay, mismatch=mismatch, versions=12)
        alone = replace(both, seeds=(1,))
        method = Method.named(CELL.method)
        assert simulate(both, prices, method).scores[1] == simulate(alone, prices, method).scores[0]


def test_a_run_repeats_itself_and_differs_between_seeds() -> None:
    task = Safes()
    cell = replace(CELL, task="safes", delay="humps", staleness=8, mismatch="flipped")
    once, again = (simulate(cell, task, Method.named("grpo")) for _ in range(2))
    assert once.scores == again.scores
    assert once.scores[0] != once.scores[1]


@pytest.mark.parametrize("name", RECIPES)
def test_a_method_learns_on_policy(prices: Prices, name: str) -> None:
    cell = replace(CELL, method=name, staleness=0, learning_rate=6e-2, versions=15)
    outcome = simulate(cell, prices, Method.named(name))
    scores = np.mean(outcome.scores, axis=0)
    assert scores[-1] > scores[0] + 0.1
    assert outcome.skipped == 0


@pytest.mark.parametrize("mismatch", [each for each in MISMATCHES if each != "none"])
def test_a_mismatch_is_felt_on_policy(prices: Prices, mismatch: str) -> None:
    cell = replace(CELL, staleness=0, mismatch=mismatch, versions=15)
    off, clean = (
        simulate(each, prices, Method.named("gspo")) for each in (cell, replace(cell, mismatch="none"))
    )
    assert off.scores != clean.scores


def test_the_history_gives_each_group_the_policy_of_its_own_lag() -> None:
    history = PolicyHistory(torch.zeros(2, 3), depth=5)
    for version in range(12):
        history.keep(version, torch.full((2, 3), float(version)) + torch.tensor([[0.0], [100.0]]))
    behind = history.behind(11, torch.tensor([[0, 4], [1, 2]]))
    assert behind[..., 0].tolist() == [[11, 7], [110, 109]]


def test_objectives_that_look_across_the_batch_are_kept_to_their_own_run() -> None:
    shape = {"groups": 4, "group_size": 8}
    assert runs_at_once(Method.named("gepo"), **shape, tokens=7)
    assert runs_at_once(Method.named("cispo"), **shape, tokens=1)
    for name, tokens in (("reinforce_plus_plus", 1), ("dapo", 1), ("cispo", 7)):
        assert not runs_at_once(Method.named(name), **shape, tokens=tokens)
