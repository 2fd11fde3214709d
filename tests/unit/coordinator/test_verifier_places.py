"""A verifier's places and time, shared out by sampler, by hand and against enemies in many forms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from node.coordinator.work.checks.verifier_places import LEAST_PATIENCE_S, STUCK_S, VerifierPlaces

NOW_S = 1_800_000_000.0
QUICK_S = 0.01
SLOW_S = 29.0
"""Below the limit: the grader is not killed, and the group agrees."""


def answered(places: VerifierPlaces, name: str, took_s: float, *, at_s: float = NOW_S) -> None:
    places.send(f"{name}-known", name, at_s)
    assert places.answer(f"{name}-known", at_s + took_s)


@pytest.fixture
def places() -> VerifierPlaces:
    """Return those of a verifier that knows one quick sampler and one slow one."""
    made = VerifierPlaces(8)
    answered(made, "quick", QUICK_S)
    answered(made, "slow", SLOW_S)
    return made


def test_a_place_goes_to_whoever_has_used_the_least_of_its_time_and_what_was_used_is_forgotten() -> None:
    places = VerifierPlaces(8)
    answered(places, "a", 0.5)
    answered(places, "b", 0.4)
    assert places.choose(["a", "b"], NOW_S + 1) == "b"
    answered(places, "b", 0.4, at_s=NOW_S + 1)
    assert places.choose(["a", "b"], NOW_S + 2) == "a"


def test_dear_and_unknown_samplers_have_a_quarter_of_the_places_and_unknown_ones_one_each(
    places: VerifierPlaces,
) -> None:
    now = NOW_S + SLOW_S
    for n in range(2):
        assert places.choose(["slow"], now) == "slow"
        places.send(f"slow-{n}", "slow", now)
    assert places.choose(["slow"], now) is None
    for n in range(2):
        assert places.choose([f"new-{n}"], now) == f"new-{n}"
        places.send(f"new-{n}", f"new-{n}", now)
        assert places.choose([f"new-{n}"], now) is None
    assert places.choose(["new-2", "slow"], now) is None
    assert places.choose(["new-2", "slow", "quick"], now) == "quick"


def test_a_newcomer_is_asked_about_once_others_are_known_to_be_stuck_and_a_quarter_stays_for_cheap_ones(
    places: VerifierPlaces,
) -> None:
    now = NOW_S + SLOW_S
    for n in range(6):
        name = f"new-{n}"
        if n % 2 == 0:
            now += STUCK_S + 1
        assert places.choose([name], now) == name
        places.send(name, name, now)
    now += STUCK_S + 1
    assert places.choose(["honest"], now) is None
    for n in range(2):
        assert places.choose(["quick"], now) == "quick"
        places.send(f"quick-{n}", "quick", now)
    places.answer("new-0", now)
    assert places.choose(["new-0", "honest"], now) == "honest"


def test_nobody_is_dear_where_all_are_equally_slow() -> None:
    places = VerifierPlaces(8)
    for name in "abc":
        answered(places, name, SLOW_S)
    assert not any(places.is_dear(name, NOW_S + SLOW_S) for name in "abc")


def test_one_sampler_alone_may_have_every_place_and_beside_another_a_part() -> None:
    places = VerifierPlaces(4)
    answered(places, "a", QUICK_S)
    for n in range(4):
        assert places.choose(["a"], NOW_S) == "a"
        places.send(f"a-{n}", "a", NOW_S)
    assert places.choose(["a"], NOW_S) is None
    for n in range(3):
        places.answer(f"a-{n}", NOW_S)
    answered(places, "b", QUICK_S)
    assert places.choose(["a"], NOW_S) is None
    assert places.choose(["a", "b"], NOW_S) == "b"


def test_a_group_that_is_stuck_makes_its_sampler_dear_before_it_is_answered() -> None:
    places = VerifierPlaces(8)
    answered(places, "quick", QUICK_S)
    answered(places, "turns", QUICK_S)
    places.send("stuck", "turns", NOW_S)
    assert not places.is_dear("turns", NOW_S + STUCK_S)
    assert places.is_dear("turns", NOW_S + STUCK_S + 1)


def test_a_dear_sampler_is_cheap_again_after_many_quick_groups_and_not_after_one(
    places: VerifierPlaces,
) -> None:
    needed = 0
    while places.is_dear("slow", NOW_S) and needed < 100:
        answered(places, "slow", QUICK_S)
        needed += 1
    assert 20 < needed < 40


def test_what_the_grader_took_counts_and_not_the_wait_for_it() -> None:
    places = VerifierPlaces(8)
    for name in ("a", "b"):
        places.send(name, name, NOW_S)
        places.answer(name, NOW_S + SLOW_S, graded_s=QUICK_S if name == "a" else None)
    assert not places.is_dear("a", NOW_S + SLOW_S)
    assert places.is_dear("b", NOW_S + SLOW_S)


def test_a_verifier_that_grades_few_at_once_has_few_places_for_dear_groups() -> None:
    places = VerifierPlaces(8, grades_at_once=2)
    assert places.choose(["new"], NOW_S) == "new"
    places.send("1", "new", NOW_S)
    assert places.choose(["other"], NOW_S) is None


def test_patience_follows_what_the_samplers_groups_took_here(places: VerifierPlaces) -> None:
    now = NOW_S + SLOW_S
    places.send("q", "quick", now)
    places.send("s", "slow", now)
    assert places.out_of_patience(now + LEAST_PATIENCE_S) == []
    assert places.out_of_patience(now + LEAST_PATIENCE_S + 1) == ["q"]
    assert places.out_of_patience(now + 59) == []
    assert places.out_of_patience(now + 61) == ["s"]
    assert "q" in places  # its place is taken all the same


def test_answers_for_earlier_groups_are_progress_and_those_for_later_ones_are_not(
    places: VerifierPlaces,
) -> None:
    now = NOW_S + SLOW_S
    for n in range(3):
        places.send(str(n), "quick", now)
    places.answer("1", now + 9, graded_s=QUICK_S)
    assert places.out_of_patience(now + 11) == ["0"]  # 2 was sent after the one that was answered
    assert places.late(now + 60) == []
    assert places.late(now + 61) == ["0"]
    assert places.late(now + 119) == []
    assert places.late(now + 121) == ["0"]  # once a term


def test_a_verifier_is_silent_once_it_has_answered_nothing_for_so_long_that_all_is_late() -> None:
    places = VerifierPlaces(8)
    assert not places.is_silent(NOW_S)
    places.send("1", "a", NOW_S)
    assert not places.is_silent(NOW_S + 60)
    assert places.is_silent(NOW_S + 61)
    places.answer("1", NOW_S + 62)
    places.send("2", "a", NOW_S + 1000)
    assert not places.is_silent(NOW_S + 1060)


def test_a_clock_that_is_set_back_makes_nobody_wait_for_it() -> None:
    places = VerifierPlaces(8)
    places.send("1", "a", NOW_S + 1e6)
    places.bound_times(NOW_S)
    assert places.out_of_patience(NOW_S + 61) == ["1"]


# Whole minutes of a verifier, beside enemies.

Took = Callable[[int], float]
"""The n-th group of a sampler to the seconds that its grader works."""


@dataclass
class Minutes:
    """A verifier for some minutes: samplers always have as many groups waiting as they may."""

    places: VerifierPlaces
    samplers: Mapping[str, Took]
    honest_every_s: float = 0.5
    """How often an honest group comes."""
    step_s: float = 0.25
    delays: list[float] = field(default_factory=list)
    """Seconds of honest groups from waiting to answered."""
    sent: dict[str, int] = field(default_factory=dict)

    def run(self, minutes: int) -> None:
        step_s, under_way = self.step_s, dict[str, tuple[float, str, float]]()
        waiting = list[float]()
        for tick in range(round(minutes * 60 / step_s)):
            now = NOW_S + tick * step_s
            for name, (due_s, sampler, came_s) in list(under_way.items()):
                if due_s <= now:
                    del under_way[name]
                    self.places.answer(name, now, graded_s=due_s - came_s)
                    if sampler == "honest":
                        self.delays.append(now - came_s)
            if tick % round(self.honest_every_s / step_s) == 0:
                waiting.append(now)
            while True:
                wanting = [name for name in self.samplers if name != "honest" or waiting]
                if (chosen := self.places.choose(wanting, now)) is None:
                    break
                came_s = waiting.pop(0) if chosen == "honest" else now
                n = self.sent[chosen] = self.sent.get(chosen, 0) + 1
                self.places.send(f"{chosen}-{n}", chosen, now)
                under_way[f"{chosen}-{n}"] = (now + self.samplers[chosen](n), chosen, came_s)
        self.delays += [NOW_S + minutes * 60 - came_s for came_s in waiting]


HONEST: Took = lambda _: QUICK_S  # noqa: E731
STALLER: Took = lambda _: SLOW_S  # noqa: E731
MIXED: Took = lambda n: SLOW_S if n % 4 == 0 else QUICK_S  # noqa: E731
VETTED_FIRST: Took = lambda n: SLOW_S if n > 200 else QUICK_S  # noqa: E731


@pytest.mark.parametrize(
    ("enemy", "count", "longest_s"),
    [
        *((STALLER, count, 1.0) for count in (1, 3, 20)),
        *((MIXED, count, 1.0) for count in (1, 3)),
        (MIXED, 20, 60.0),
        *((VETTED_FIRST, count, 1.0) for count in (1, 3)),
        (VETTED_FIRST, 6, 90.0),  # each has a quarter of the places once, until it is known
    ],
)
def test_an_honest_sampler_is_checked_at_once_beside_however_many_that_stall(
    enemy: Took, count: int, longest_s: float
) -> None:
    others = {f"enemy-{n}": enemy for n in range(count)}
    minutes = Minutes(VerifierPlaces(8), {"honest": HONEST, **others})
    answered(minutes.places, "honest", QUICK_S)
    minutes.run(5)
    delays = sorted(minutes.delays)
    assert delays[-1] <= longest_s
    assert delays[len(delays) // 2] <= 0.5


def test_a_verifier_with_one_place_serves_the_honest_between_two_that_stall() -> None:
    samplers = {"honest": HONEST, "enemy-1": STALLER, "enemy-2": STALLER}
    minutes = Minutes(VerifierPlaces(1), samplers, step_s=0.1)
    minutes.run(5)
    assert max(minutes.delays) <= 2 * SLOW_S + 5  # each newcomer comes first, once
    assert minutes.sent["honest"] >= 540
