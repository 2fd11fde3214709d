"""The laboratory itself: seeds apart, behaviour as old as it says, weights 1 on policy."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.staleness_lab.cells import Cell
from bench.staleness_lab.digits import DigitsBandit
from bench.staleness_lab.letters import WordReversal
from bench.staleness_lab.methods import RECIPES, Method
from bench.staleness_lab.seeds import runs_at_once
from bench.staleness_lab.simulation import PolicyHistory, simulate

CELL = Cell("table", "digits", "version_aware", "", "fixed", 4, 3e-3, (0, 1), 30)


@pytest.fixture(scope="module")
def bandit(tmp_path_factory: pytest.TempPathFactory) -> DigitsBandit:
    """Images of which a bright row tells the label."""
    rng = np.random.default_rng(0)
    label = rng.integers(8, size=600)
    image = rng.integers(4, size=(600, 8, 8))
    image[np.arange(600), label] += 12
    path: Path = tmp_path_factory.mktemp("digits") / "digits.npz"
    np.savez(path, image=image.reshape(600, 64).astype(np.uint8), label=label.astype(np.uint8))
    return DigitsBandit(path)


@pytest.fixture(scope="module")
def letters() -> WordReversal:
    """The token task; warm starts are kept in it."""
    return WordReversal()


def test_a_seed_runs_the_same_whichever_seeds_run_beside_it(bandit: DigitsBandit) -> None:
    for delay in ("fixed", "uniform"):
        both = replace(CELL, delay=delay)
        alone = replace(both, seeds=(1,))
        method = Method.named(CELL.method)
        assert simulate(both, bandit, method).scores[1] == simulate(alone, bandit, method).scores[0]


def test_every_method_learns_on_policy(bandit: DigitsBandit) -> None:
    for name in RECIPES:
        cell = replace(CELL, method=name, staleness=0, versions=40, learning_rate=1e-2)
        outcome = simulate(cell, bandit, Method.named(name))
        scores = np.mean(outcome.scores, axis=0)
        assert scores[-1] > scores[0] + 0.1, name
        assert outcome.skipped == 0


def test_on_policy_there_is_no_divergence_and_plain_weights_are_all_equal(bandit: DigitsBandit) -> None:
    measures = simulate(replace(CELL, staleness=0), bandit, Method.named("gspo")).measures
    for name in ("kl", "variance_gspo", "variance_own"):
        assert [v for v in measures[name] if v is not None] == pytest.approx([0, 0, 0], abs=1e-9)


def test_old_behaviour_diverges(bandit: DigitsBandit) -> None:
    measures = simulate(replace(CELL, versions=100), bandit, Method.named("grpo")).measures
    assert measures["lag"][-1] == 4
    assert (measures["kl"][-1] or 0) > 1e-5


def test_the_history_gives_each_group_the_policy_of_its_own_lag() -> None:
    history = PolicyHistory(torch.zeros(2, 3), depth=5)
    for version in range(12):
        history.keep(version, torch.full((2, 3), float(version)) + torch.tensor([[0.0], [100.0]]))
    behind = history.behind(11, torch.tensor([[0, 4], [1, 2]]))
    assert behind[..., 0].tolist() == [[11, 7], [110, 109]]


def test_what_sampling_recorded_is_what_scoring_says(letters: WordReversal) -> None:
    theta = letters.start((0, 1))
    prompt = torch.arange(8).view(2, 4)
    completions = letters.sample(theta, prompt, torch.rand(2, 4, 8, letters.tokens))
    again = letters.log_probability(theta, prompt, completions.token)
    written = completions.mask.unsqueeze(-1)
    assert torch.allclose(completions.log_probability * written, again * written, atol=1e-4)
    assert len(set(completions.mask.sum(-1).flatten().tolist())) > 1


def test_the_warm_start_leaves_something_to_learn(letters: WordReversal) -> None:
    score = letters.score(letters.start((0, 1)))
    assert (score > 0.05).all()
    assert (score < 0.5).all()


def test_objectives_that_look_across_the_batch_are_kept_to_their_own_run() -> None:
    shape = {"groups": 4, "group_size": 8}
    assert runs_at_once(Method.named("gepo"), **shape, tokens=7)
    assert runs_at_once(Method.named("cispo"), **shape, tokens=1)
    for name, tokens in (("m2po", 1), ("reinforce_plus_plus", 1), ("dapo", 1), ("cispo", 7)):
        assert not runs_at_once(Method.named(name), **shape, tokens=tokens)
