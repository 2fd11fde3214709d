"""The laboratory itself: seeds apart, behaviour as old as it says, weights 1 on policy."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.staleness_lab.cells import Cell, Setting
from bench.staleness_lab.codes import Codes
from bench.staleness_lab.digits import DigitsBandit
from bench.staleness_lab.letters import word_reversal
from bench.staleness_lab.methods import RECIPES, Method
from bench.staleness_lab.mismatch import MISMATCHES
from bench.staleness_lab.seeds import runs_at_once
from bench.staleness_lab.simulation import PolicyHistory, drawn_prompts, simulate
from bench.staleness_lab.tasks import Task

CELL = Cell("digits", "version_aware", Setting(), "", "fixed", 4, "none", 3e-3, (0, 1), 30)


@pytest.fixture(scope="module")
def bandit(tmp_path_factory: pytest.TempPathFactory) -> DigitsBandit:
    """Images of which a bright row tells the label."""
    rng = np.random.default_rng(0)
    label = rng.integers(8, size=600)
    image = rng.integers(4, size=(600, 8, 8))
    image[np.arange(600), label] += 12
    folder: Path = tmp_path_factory.mktemp("digits")
    image, label = image.reshape(600, 64).astype(np.uint8), label.astype(np.uint8)
    np.savez(folder / "digits.npz", image=image, label=label)
    return DigitsBandit(folder)


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_a_seed_runs_the_same_whichever_seeds_run_beside_it(bandit: DigitsBandit, mismatch: str) -> None:
    for delay in ("fixed", "humps"):
        both = replace(CELL, delay=delay, mismatch=mismatch, versions=12)
        alone = replace(both, seeds=(1,))
        method = Method.named(CELL.method)
        assert simulate(both, bandit, method).scores[1] == simulate(alone, bandit, method).scores[0]


def test_a_run_repeats_itself_and_differs_between_seeds() -> None:
    task = Codes(8)
    cell = replace(CELL, task="codes8", delay="humps", staleness=8, mismatch="flipped")
    once, again = (simulate(cell, task, Method.named("grpo")) for _ in range(2))
    assert once.scores == again.scores
    assert once.measures == again.measures
    assert once.scores[0] != once.scores[1]


def test_every_method_learns_on_policy(bandit: DigitsBandit) -> None:
    for name in RECIPES:
        cell = replace(CELL, method=name, staleness=0, versions=15, learning_rate=2e-2)
        outcome = simulate(cell, bandit, Method.named(name))
        scores = np.mean(outcome.scores, axis=0)
        assert scores[-1] > scores[0] + 0.1, name
        assert outcome.skipped == 0


def test_on_policy_there_is_no_divergence_and_every_weight_counts(bandit: DigitsBandit) -> None:
    measures = simulate(replace(CELL, staleness=0), bandit, Method.named("gspo")).measures
    assert [v for v in measures["kl"] if v is not None] == pytest.approx([0] * 10, abs=1e-9)
    assert [v for v in measures["ess"] if v is not None] == pytest.approx([1] * 10)


def test_old_behaviour_diverges(bandit: DigitsBandit) -> None:
    measures = simulate(replace(CELL, versions=100), bandit, Method.named("grpo")).measures
    assert measures["lag"][-1] == 4
    assert (measures["kl"][-1] or 0) > 1e-5


@pytest.mark.parametrize("mismatch", [each for each in MISMATCHES if each != "none"])
def test_a_mismatch_is_felt_on_policy(bandit: DigitsBandit, mismatch: str) -> None:
    cell = replace(CELL, staleness=0, mismatch=mismatch, versions=60)
    off, clean = (
        simulate(each, bandit, Method.named("gspo")) for each in (cell, replace(cell, mismatch="none"))
    )
    assert off.scores != clean.scores


@pytest.mark.parametrize("name", ["decoupled_ppo", "tis", "mis_geometric"])
def test_a_clip_to_the_proximal_policy_acts_only_where_a_version_takes_several_steps(name: str) -> None:
    narrow = {"clip_low": 1e-6, "clip_high": 1e-6}

    def differs(task: Task) -> bool:
        cell = replace(CELL, staleness=0, versions=8, learning_rate=3e-2)
        scores = [simulate(cell, task, Method.named(name, changes)).scores for changes in ({}, narrow)]
        return scores[0] != scores[1]

    assert not differs(Codes(16, groups=8, steps=1))
    assert differs(Codes(16, groups=8, steps=4))


def test_the_history_gives_each_group_the_policy_of_its_own_lag() -> None:
    history = PolicyHistory(torch.zeros(2, 3), depth=5)
    for version in range(12):
        history.keep(version, torch.full((2, 3), float(version)) + torch.tensor([[0.0], [100.0]]))
    behind = history.behind(11, torch.tensor([[0, 4], [1, 2]]))
    assert behind[..., 0].tolist() == [[11, 7], [110, 109]]


def test_prompts_of_a_shifting_task_move_from_the_first_quarter_to_the_last() -> None:
    task = Codes(8)
    task.prompts, task.shifts = 1000, True
    prompts = drawn_prompts(replace(CELL, versions=200), task)
    assert prompts.shape == (200, 2, task.groups)
    assert int(prompts[:10].max()) < 290
    assert int(prompts[-10:].min()) >= 710
    assert int(prompts.max()) < 1000


def test_objectives_that_look_across_the_batch_are_kept_to_their_own_run() -> None:
    shape = {"groups": 4, "group_size": 8}
    assert runs_at_once(Method.named("gepo"), **shape, tokens=7)
    assert runs_at_once(Method.named("cispo"), **shape, tokens=1)
    for name, tokens in (("reinforce_plus_plus", 1), ("dapo", 1), ("cispo", 7)):
        assert not runs_at_once(Method.named(name), **shape, tokens=tokens)


def test_the_warm_start_leaves_something_to_learn() -> None:
    letters = word_reversal()
    score = letters.score(letters.start((0, 1)))
    assert (score > 0.05).all()
    assert (score < 0.5).all()
