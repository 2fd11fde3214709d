"""Rewards of the laboratory's tasks against answers worked by hand, and the faults that it injects."""

import itertools

import numpy as np
import pytest
import torch

from bench.staleness_lab.answers import END, PAD, AnswerTask
from bench.staleness_lab.batched import Shapes
from bench.staleness_lab.codes import Codes
from bench.staleness_lab.colours import Colours
from bench.staleness_lab.intervals import Intervals
from bench.staleness_lab.knapsack import Knapsack, most_value
from bench.staleness_lab.lander import Lander
from bench.staleness_lab.letters import word_reversal
from bench.staleness_lab.maze import Maze
from bench.staleness_lab.mismatch import given_reward, sampling_weights
from bench.staleness_lab.palindromes import is_palindrome, palindrome_task
from bench.staleness_lab.prices import Prices
from bench.staleness_lab.routes import Routes, shortest_round_trips
from bench.staleness_lab.safes import Safes
from bench.staleness_lab.sorting import word_sorting
from bench.staleness_lab.tasks import Task
from bench.staleness_lab.unpacking import word_unpacking


def small_palindromes() -> AnswerTask:
    """The task on a few dozen short questions, hardly pretrained."""
    import reasoning_gym  # not on every machine

    dataset = reasoning_gym.create_dataset(
        "palindrome_generation", seed=1, size=64, min_length=3, max_length=4
    )
    texts = [(entry["question"].strip().splitlines()[-1], entry["answer"]) for entry in dataset]
    return palindrome_task(texts, held_out=16, warm_score=1e-3)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(word_reversal, id="letters"),
        pytest.param(lambda: Codes(64), id="codes64"),
        pytest.param(Routes, id="routes"),
        pytest.param(Maze, id="maze"),
        pytest.param(Knapsack, id="knapsack"),
        pytest.param(Safes, id="safes"),
        pytest.param(Prices, id="prices"),
        pytest.param(Lander, id="lander"),
        pytest.param(word_sorting, id="sorting"),
        pytest.param(Colours, id="colours"),
        pytest.param(Intervals, id="intervals"),
        pytest.param(word_unpacking, id="unpacking"),
        pytest.param(small_palindromes, id="palindromes", marks=pytest.mark.needs("reasoning_gym")),
    ],
)
def task(request: pytest.FixtureRequest) -> Task:
    """Every task but digits."""
    made: Task = request.param()
    return made


def test_what_sampling_recorded_is_what_scoring_says(task: Task) -> None:
    theta = task.start((0, 1))
    prompt = torch.arange(8).view(2, 4)
    uniform = torch.rand(2, 4, task.group_size, task.tokens, generator=torch.Generator().manual_seed(0))
    completions = task.sample(theta, prompt, uniform)
    again = task.log_probability(theta, prompt, completions.token)
    written = completions.mask.unsqueeze(-1)
    assert torch.allclose(completions.log_probability * written, again * written, atol=1e-4)
    assert completions.reward.shape == (2, 4, task.group_size)
    assert ((completions.reward >= 0) & (completions.reward <= 1)).all()


def test_the_score_is_between_nothing_and_the_ceiling_at_the_start(task: Task) -> None:
    score = task.score(task.start((0, 1)))
    assert score.shape == (2,)
    assert ((score >= 0) & (score < 0.6)).all()


def test_a_starting_policy_is_rewarded_for_a_sparse_reward_now_and_then() -> None:
    for sparse in (Codes(8), Codes(512), Maze()):
        theta = sparse.start((0,))
        uniform = torch.rand(1, 8, 32, sparse.tokens, generator=torch.Generator().manual_seed(1))
        reward = sparse.sample(theta, torch.arange(8).view(1, 8), uniform).reward
        assert set(reward.flatten().tolist()) == {0.0, 1.0}
        assert 0.01 < float(reward.mean()) < 0.3


def test_a_code_is_paid_for_its_four_decisive_places_whatever_its_length() -> None:
    for tokens in (8, 64, 512):
        task = Codes(tokens)
        theta = task.start((0, 1))
        assert task.score(theta).tolist() == pytest.approx([0.1, 0.1], abs=0.04)


def test_the_shortest_round_trip_is_the_shortest_of_all_orders() -> None:
    place = np.random.default_rng(3).random((3, 6, 2))
    distance = np.linalg.norm(place[:, :, None] - place[:, None], axis=-1)
    orders = [(0, *rest, 0) for rest in itertools.permutations(range(1, 6))]
    by_hand = [
        min(sum(each[a, b] for a, b in itertools.pairwise(order)) for order in orders) for each in distance
    ]
    assert shortest_round_trips(distance) == pytest.approx(by_hand)


def test_a_tour_visits_every_city_once_and_a_shorter_one_is_worth_more() -> None:
    task = Routes()
    uniform = torch.rand(1, 2, 64, task.tokens, generator=torch.Generator().manual_seed(2))
    completions = task.sample(task.start((0,)), torch.tensor([[0, 1]]), uniform)
    assert (completions.token.sort(-1).values == torch.arange(1, 10)).all()
    assert len(set(completions.reward.flatten().tolist())) > 50
    assert 0.9 > float(completions.reward.max()) > float(completions.reward.mean()) > 0


def test_a_walk_ends_at_the_goal_and_is_rewarded_there_alone() -> None:
    task = Maze()
    uniform = torch.rand(1, 64, 8, task.tokens, generator=torch.Generator().manual_seed(2))
    completions = task.sample(task.start((0,)), torch.arange(64).view(1, 64), uniform)
    length = completions.mask.sum(-1)
    assert (completions.reward[length < task.tokens] == 1).all()
    assert (length[completions.reward == 1] >= 4).all()


def test_the_most_that_fits_is_the_most_of_all_choices() -> None:
    rng = np.random.default_rng(4)
    weight, value = rng.integers(1, 9, (5, 8)), rng.random((5, 8))
    capacity = weight.sum(1) // 2
    choices = np.array(list(itertools.product((0, 1), repeat=8)))
    fits = choices @ weight.T <= capacity
    assert most_value(weight, value, capacity) == pytest.approx(np.where(fits, choices @ value.T, 0).max(0))


def test_a_sack_that_bursts_is_worth_nothing_and_any_other_the_value_in_it() -> None:
    task = Knapsack()
    uniform = torch.rand(1, 64, 8, task.tokens, generator=torch.Generator().manual_seed(2))
    sacks = task.sample(task.start((0,)), torch.arange(64).view(1, 64), uniform)
    has_burst = sacks.reward == 0
    assert 0.5 < float(has_burst.float().mean()) < 0.95
    assert sacks.mask[~has_burst].all()
    assert 0.9 > float(sacks.reward.max()) > 0.5


@pytest.mark.needs("reasoning_gym")
def test_a_palindrome_is_right_where_reasoning_gym_says_so() -> None:
    import reasoning_gym  # not on every machine

    dataset = reasoning_gym.create_dataset(
        "palindrome_generation", seed=2, size=20, min_length=4, max_length=5
    )
    letters = sorted({letter for entry in dataset for letter in entry["answer"]})

    def tokens(word: str) -> torch.Tensor:
        known = [letters.index(letter) + 2 for letter in word] + [END]
        return torch.tensor(known + [PAD] * (7 - len(known)))

    rng = np.random.default_rng(0)
    verdicts = set()
    for entry in dataset:
        answer = entry["answer"]
        shuffled = ["".join(rng.permutation(list(answer))) for _ in range(20)]
        for word in (answer, answer[:-1], answer + answer[-1], letters[0] * len(answer), *shuffled):
            is_right = bool(is_palindrome(tokens(word), tokens(answer)))
            assert is_right == (dataset.score_answer(word, entry) == 1.0), (word, answer)
            verdicts.add(is_right)
    assert verdicts == {True, False}


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
