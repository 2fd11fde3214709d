"""Rewards of the laboratory's tasks against answers worked by hand, and the faults that it injects."""

from functools import cache

import pytest
import torch

from bench.staleness_lab.answers import END, PAD
from bench.staleness_lab.batched import Shapes
from bench.staleness_lab.colours import Colours
from bench.staleness_lab.intervals import Intervals
from bench.staleness_lab.mismatch import given_reward, sampling_weights
from bench.staleness_lab.pool import TASKS
from bench.staleness_lab.safes import Safes
from bench.staleness_lab.tasks import Task


@cache
def made(name: str) -> Task:
    """Return a task; some begin with a policy that is trained first."""
    return TASKS[name]()


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return made(request.param)


def test_what_sampling_recorded_is_what_scoring_says(task: Task) -> None:
    theta = task.shapes.initial((0, 1))
    prompt = torch.arange(8).view(2, 4)
    uniform = torch.rand(2, 4, task.group_size, task.tokens, generator=torch.Generator().manual_seed(0))
    completions = task.sample(theta, prompt, uniform)
    again = task.log_probability(theta, prompt, completions.token)
    written = completions.mask.unsqueeze(-1)
    assert torch.allclose(completions.log_probability * written, again * written, atol=1e-4)
    assert completions.reward.shape == (2, 4, task.group_size)
    assert ((completions.reward >= 0) & (completions.reward <= 1)).all()


@pytest.mark.parametrize("name", [name for name in TASKS if name != "unpacking"])
def test_the_score_is_between_nothing_and_the_ceiling_at_the_start(name: str) -> None:
    """But for one of the two tasks whose policy is trained first, which takes a second."""
    score = made(name).score(made(name).start((0, 1)))
    assert score.shape == (2,)
    assert ((score >= 0) & (score < 0.6)).all()


def test_a_safe_opens_now_and_then_by_chance() -> None:
    task = Safes()
    uniform = torch.rand(1, 8, 256, task.tokens, generator=torch.Generator().manual_seed(1))
    reward = task.sample(task.start((0,)), torch.arange(8).view(1, 8), uniform).reward
    assert set(reward.flatten().tolist()) == {0.0, 1.0}
    assert 0.002 < float(reward.mean()) < 0.05  # (1/4)^3 for a uniform policy


def test_a_word_is_right_with_its_letters_in_order_alone_and_some_are_after_the_warm_start() -> None:
    task = made("sorting")
    prompt = torch.arange(16).view(1, 16)
    uniform = torch.rand(1, 16, 64, task.tokens, generator=torch.Generator().manual_seed(1))
    written = task.sample(task.start((0,)), prompt, uniform)
    right: dict[int, list[int]] = {}
    for word in range(16):
        for token, reward in zip(written.token[0, word].tolist(), written.reward[0, word], strict=True):
            letters = [one for one in token if one not in (END, PAD)]
            if reward:
                assert letters == sorted(letters)
                assert token[len(letters)] == END
                assert right.setdefault(word, token) == token
    assert 0.1 < float(written.reward.mean()) < 0.5


def test_a_quantised_block_keeps_its_largest_weight_and_fifteen_levels() -> None:
    theta = torch.linspace(-1, 1, 100).expand(2, 3, 100)
    shapes = Shapes({"hidden": (40,), "output": (60,)})
    rounded = sampling_weights("quantised", theta, shapes)
    assert rounded.shape == theta.shape
    assert rounded[0, 0, 0] == pytest.approx(-1.0)
    assert len(set(rounded[0, 0, :64].tolist())) <= 15
    assert float((rounded - theta).abs().max()) <= 1 / 14 + 1e-6
    assert sampling_weights("flipped", theta, shapes) is theta
    warmed = sampling_weights("samplers", theta, shapes)
    assert torch.equal(warmed[..., :40], theta[..., :40])
    ratio = (theta / warmed)[0, :, 40:].mean(1).tolist()
    assert ratio == pytest.approx([0.7, 1.3, 0.7])


def test_one_reward_in_seven_is_turned_round() -> None:
    reward = torch.full((1, 20_000), 0.8)
    given = given_reward("flipped", reward, [torch.Generator().manual_seed(0)])
    assert sorted(set(given.flatten().tolist())) == pytest.approx([0.2, 0.8])
    assert float((given < 0.5).double().mean()) == pytest.approx(0.15, abs=0.01)
    assert given_reward("none", reward, []) is reward


def test_a_colouring_is_paid_by_the_clashes_of_neighbours_in_nine_levels() -> None:
    task = Colours()
    uniform = torch.rand(1, 8, 64, task.tokens, generator=torch.Generator().manual_seed(2))
    completions = task.sample(task.start((0,)), torch.arange(8).view(1, 8), uniform)
    levels = set((8 * completions.reward).flatten().tolist())
    assert levels <= {float(level) for level in range(9)}
    assert len(levels) > 4
    assert 0.02 < float(completions.reward.mean()) < 0.2
    for colour in range(3):  # of one colour, all neighbours clash
        sure = torch.zeros(1, 8, task.tokens, 3)
        sure[..., colour] = 30
        same = task.sample(sure.view(1, -1), torch.arange(8).view(1, 8), uniform)
        assert (same.token == colour).all()
        assert (same.reward == 0).all()


def test_an_interval_is_paid_for_being_narrow_if_it_holds_the_quantity() -> None:
    task = Intervals()
    theta = task.start((0,))
    uniform = torch.rand(1, 64, 64, 2, generator=torch.Generator().manual_seed(2))
    completions = task.sample(theta, torch.arange(64).view(1, 64), uniform)
    lower, width = completions.token.unbind(-1)
    paid = completions.reward > 0
    assert torch.equal(completions.reward[paid], 1 - width[paid] / 16)
    for each in range(64):  # one level of a prompt is in every paid interval and in no other
        inside = [(lower[0, each] <= level) & (level <= (lower + width)[0, each]) for level in range(16)]
        assert any(torch.equal(holds, paid[0, each]) for holds in inside)
    everything = torch.rand(1, 512, 256, 2, generator=torch.Generator().manual_seed(3))
    drawn = task.sample(theta, torch.arange(1024, 1536).view(1, 512), everything).reward.mean()
    assert float(task.score(theta)) == pytest.approx(float(drawn), abs=0.01)
