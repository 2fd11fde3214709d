"""When a sampler stays at a version because it is evaluated, and when it goes on."""

import pytest

from node.rollout import LeasePurpose, PromptLease
from sampler.stopover import LONGEST_STOP_S, Stopover
from support.groups import SAMPLING


def lease(version: int | None) -> PromptLease:
    purpose = LeasePurpose.TRAINING if version is None else LeasePurpose.EVALUATION
    return PromptLease("e", "addition", 0, 1, SAMPLING, 60.0, purpose, policy_version=version)


class Sampler:
    """A sampler that holds one version after another."""

    def __init__(self) -> None:
        self.generating: set[int] = set()
        self.arrivals = self.leavings = 0
        self.now = 100.0
        self.stopover = Stopover(
            is_generating=self.generating.__contains__, arrived=self._arrived, left=self._left
        )

    def _arrived(self) -> None:
        self.arrivals += 1

    def _left(self) -> None:
        self.leavings += 1

    def arrive(self, version: int) -> None:
        self.stopover.arrive(version, now=self.now)

    def ask(self, version: int, *leases: PromptLease, from_version: int | None = None) -> None:
        had_to_ask = self.stopover.has_to_ask(version)
        self.generating |= {one.policy_version for one in leases if one.policy_version is not None}
        self.stopover.answered(
            version, leases, from_version=from_version, had_to_ask=had_to_ask, now=self.now
        )

    def holds(self, version: int) -> bool:
        return self.stopover.holds(version, now=self.now)


@pytest.fixture
def sampler() -> Sampler:
    return Sampler()


def test_a_sampler_that_was_told_of_nothing_passes_every_version_by(sampler: Sampler) -> None:
    sampler.arrive(1)
    assert not sampler.holds(1)
    assert not sampler.stopover.has_to_ask(1)


@pytest.mark.parametrize(
    ("before", "version", "stops"), [(8, 9, False), (9, 10, True), (8, 12, True), (10, 11, False)]
)
def test_it_stops_at_the_first_version_from_the_one_it_was_told(
    sampler: Sampler, before: int, version: int, stops: bool
) -> None:
    sampler.arrive(before)
    sampler.ask(before, from_version=10)
    sampler.arrive(version)
    assert sampler.holds(version) is stops
    assert sampler.arrivals == stops


def test_it_does_not_stop_where_the_way_to_the_head_leads_back_through_a_version_it_was_evaluated_at(
    sampler: Sampler,
) -> None:
    sampler.ask(9, from_version=10)
    sampler.arrive(10)
    sampler.ask(10, from_version=10)
    for on_the_way in (14, 8, 10, 16):
        sampler.arrive(on_the_way)
        assert not sampler.holds(on_the_way)
    assert sampler.arrivals == 1


def test_it_goes_on_once_it_asked_and_got_nothing_for_evaluation(sampler: Sampler) -> None:
    sampler.ask(9, from_version=10)
    sampler.arrive(10)
    assert sampler.stopover.has_to_ask(10)
    sampler.ask(10, lease(None), from_version=10)
    assert not sampler.holds(10)
    assert sampler.leavings == 1


def test_it_stays_until_its_prompts_are_generated_and_it_asked_again_and_got_none(sampler: Sampler) -> None:
    sampler.ask(9, from_version=10)
    sampler.arrive(10)
    sampler.ask(10, lease(10), from_version=10)
    assert not sampler.stopover.has_to_ask(10)
    sampler.ask(10, from_version=10)  # it has its share
    sampler.now += 10 * LONGEST_STOP_S
    assert sampler.holds(10)
    sampler.now -= 10 * LONGEST_STOP_S
    sampler.generating.clear()
    assert sampler.holds(10)
    assert sampler.stopover.has_to_ask(10)
    sampler.ask(10, lease(10), from_version=10)
    sampler.generating.clear()
    sampler.ask(10, from_version=20)
    assert not sampler.holds(10)


def test_prompts_of_the_version_it_holds_stop_it_wherever_it_is(sampler: Sampler) -> None:
    sampler.ask(0, lease(0), lease(None))
    assert sampler.holds(0)


def test_an_answer_that_was_asked_for_at_another_version_changes_nothing(sampler: Sampler) -> None:
    sampler.ask(9, from_version=10)
    sampler.arrive(10)
    sampler.ask(9, from_version=10)
    assert sampler.holds(10)


def test_it_does_not_wait_for_a_hub_that_does_not_answer(sampler: Sampler) -> None:
    sampler.ask(9, from_version=10)
    sampler.arrive(10)
    sampler.now += LONGEST_STOP_S
    assert not sampler.holds(10)
