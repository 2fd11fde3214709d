"""How many groups a sampler generates at once, at a simulated engine."""

import itertools

import pytest

from sampler.engines.engine import EngineUse
from sampler.rollouts.concurrency import FIRST_GROUPS, Concurrency
from support.simulated_engine import COMPLETIONS, STEP_S, Shape, SimulatedSampler

SEEDS = range(2)

BIG_BATCH = Shape(batch=256, cache_tokens=1_000_000, median_tokens=20, most_tokens=24, sigma=0.25)
"""A GPU at word problems: 24 tokens at most."""
SMALL_BATCH = Shape(batch=64, cache_tokens=1_000_000, median_tokens=20, most_tokens=100)
SMALL_CACHE = Shape(batch=256, cache_tokens=8_000, median_tokens=30, most_tokens=240)
SKEWED = Shape(batch=256, cache_tokens=8_000, median_tokens=20, most_tokens=400, sigma=1.2)
FAR_HUB = Shape(batch=64, cache_tokens=1_000_000, median_tokens=20, most_tokens=100, lease_steps=20)
TINY = Shape(batch=16, cache_tokens=1_000_000, median_tokens=30, most_tokens=240)
FEW_GROUPS = Shape(batch=256, cache_tokens=600, median_tokens=20, most_tokens=100)

SETTLING_GROUPS = 150
"""Until the number is about right, from ``FIRST_GROUPS``."""


def settled(shape: Shape, seed: int) -> SimulatedSampler:
    sampler = SimulatedSampler(shape, seed=seed)
    sampler.run(10_000, until=lambda seen: seen.groups >= SETTLING_GROUPS)
    return sampler


def turns(numbers: list[int]) -> int:
    """Return how often the number went the other way than before."""
    ways = [after > before for before, after in itertools.pairwise(numbers)]
    return sum(way != before for before, way in itertools.pairwise(ways))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [SMALL_CACHE, SKEWED], ids=["skewed", "very skewed"])
def test_the_cache_is_kept_between_the_marks(shape: Shape, seed: int) -> None:
    seen = settled(shape, seed).run(1500)
    assert 0.6 <= seen.cache_share <= 0.9
    assert seen.queue_share < 0.05
    assert seen.preempted <= 0.05 * seen.groups * COMPLETIONS
    assert turns(seen.numbers) <= 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "shape", [BIG_BATCH, SMALL_BATCH, FAR_HUB, TINY], ids=["big", "small", "far hub", "tiny"]
)
def test_the_batch_is_full_and_the_queue_before_it_short(shape: Shape, seed: int) -> None:
    seen = settled(shape, seed).run(1500)
    assert seen.tokens / seen.steps > 0.85 * shape.batch
    assert seen.queue_share <= 0.25
    assert turns(seen.numbers) <= 2


def test_a_gpu_that_eight_groups_leave_idle_is_filled_and_groups_take_hardly_longer() -> None:
    def drawn(sampler: SimulatedSampler) -> tuple[float, float]:
        seen = sampler.run(600)
        assert sampler.work_queue.group_s is not None
        return seen.tokens / seen.steps, sampler.work_queue.group_s / STEP_S

    eight, eight_steps = drawn(SimulatedSampler(BIG_BATCH, seed=0, fixed=FIRST_GROUPS))
    many, many_steps = drawn(SimulatedSampler(BIG_BATCH, seed=0, fixed=128))
    followed, followed_steps = drawn(settled(BIG_BATCH, 0))
    assert eight < 0.2 * many
    assert followed > 0.97 * many
    assert followed_steps < 1.25 * eight_steps
    assert many_steps > 2 * eight_steps


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cache_that_eight_groups_overfill_is_left_to_fewer(seed: int) -> None:
    eight = SimulatedSampler(FEW_GROUPS, seed=seed, fixed=FIRST_GROUPS).run(1500)
    sampler = settled(FEW_GROUPS, seed)
    seen = sampler.run(1500)
    assert seen.cache_share <= 0.9
    assert seen.preempted / seen.groups < 0.5 * eight.preempted / eight.groups
    assert seen.tokens > 0.7 * eight.tokens  # though what is dropped is computed again for nothing here


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_it_finds_its_way_back_when_lengths_change(factor: float, seed: int) -> None:
    sampler = settled(SMALL_CACHE, seed)
    sampler.change_lengths(factor)
    sampler.run(10_000, until=lambda seen: seen.groups >= 2 * SETTLING_GROUPS)
    seen = sampler.run(1500)
    assert 0.55 <= seen.cache_share <= 0.92
    assert seen.queue_share < 0.1


def test_a_number_that_the_hub_does_not_grant_is_not_raised() -> None:
    sampler = SimulatedSampler(SMALL_BATCH, seed=0)
    sampler.most_leases = 5
    assert sampler.run(2000).numbers == [FIRST_GROUPS]
    sampler.most_leases = 1 << 20
    sampler.run(2000)
    assert sampler.work_queue.concurrency_groups > 2 * FIRST_GROUPS


def numbers_after(*uses: EngineUse, is_held_back: bool = False) -> list[int]:
    """Return the numbers of groups at once, where readings stay for 10 s each, as long as a group takes."""
    concurrency = Concurrency(now=0.0)
    numbers = [concurrency.groups]
    for period, use in enumerate(uses):
        for second in range(1, 11):
            now = 10.0 * period + second
            concurrency.note(use, is_held_back=is_held_back, group_s=10.0, now=now)
            if concurrency.groups != numbers[-1]:
                numbers.append(concurrency.groups)
    return numbers


@pytest.mark.parametrize(
    ("use", "periods", "numbers"),
    [
        (EngineUse(0.0, 0.1), 1, [8, 16]),  # plainly empty: at once, and no more than twice as many
        (EngineUse(0.3, 0.1), 2, [8, 16, 32]),
        (EngineUse(0.5, 0.1), 3, [8]),  # maybe by chance: after 32 groups, which are four times eight
        (EngineUse(0.5, 0.1), 4, [8, 12]),
        (EngineUse(0.1, 0.85), 4, [8, 10]),
        (EngineUse(0.59, 0.89), 4, [8, 9]),
        (EngineUse(0.6, 0.5), 9, [8]),
        (EngineUse(0.2, 0.95), 9, [8]),
        (EngineUse(0.89, 1.2), 9, [8]),
        (EngineUse(0.95, 0.5), 1, [8, 7]),
        (EngineUse(0.3, 1.3), 3, [8]),
        (EngineUse(0.3, 1.3), 4, [8, 7]),
        (EngineUse(0.3, 2.0), 1, [8, 5]),
        (EngineUse(1.0, 2.0), 5, [8, 5, 3, 2, 1]),
    ],
)
def test_the_next_number_aims_at_the_middle(use: EngineUse, periods: int, numbers: list[int]) -> None:
    assert numbers_after(*periods * [use]) == numbers


def test_held_back_it_gives_up_groups_and_asks_for_no_more() -> None:
    assert numbers_after(EngineUse(1.0, 0.1), is_held_back=True) == [8, 6]


def test_one_group_more_is_not_asked_for_where_it_would_be_too_many() -> None:
    to_one = 5 * [EngineUse(1.0, 2.0)]
    assert numbers_after(*to_one, *99 * [EngineUse(0.5, 0.1)]) == [8, 5, 3, 2, 1]
    assert numbers_after(*to_one, *99 * [EngineUse(0.1, 0.7)]) == [8, 5, 3, 2, 1]
    assert numbers_after(*to_one, *33 * [EngineUse(0.4, 0.1)]) == [8, 5, 3, 2, 1, 2]
