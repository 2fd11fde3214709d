import random

import pytest

from learner.intake import trained_slots
from learner.intake.trained_slots import TrainedSlots


def test_slots_in_order_are_one_run_and_any_attempt_of_them_is_known() -> None:
    slots = TrainedSlots().with_groups(f"{n}.1" for n in range(10_000))
    assert slots.runs == ((0, 9_999),)
    assert "0.1" in slots
    assert "9999.7" in slots
    assert "10000.1" not in slots


def test_any_order_gives_the_same_runs_as_a_plain_set() -> None:
    draw = random.Random(5)
    numbers = [*draw.sample(range(400), 300), 1_800_000_000_000_000, 1_800_000_000_000_001]
    draw.shuffle(numbers)
    slots = TrainedSlots()
    for start in range(0, len(numbers), 7):
        slots = slots.with_groups(f"{n}.2" for n in numbers[start : start + 7])
    assert {n for first, last in slots.runs for n in range(first, last + 1)} == set(numbers)
    assert {n for n in range(410) if f"{n}.3" in slots} == {n for n in numbers if n < 410}
    assert all(before[1] + 1 < after[0] for before, after in zip(slots.runs, slots.runs[1:], strict=False))
    assert TrainedSlots(slots.runs).with_groups(f"{n}.1" for n in numbers).runs == slots.runs


def test_a_slot_below_the_first_run_or_in_a_hole_was_not_trained_on() -> None:
    slots = TrainedSlots(((5, 9), (12, 12)))
    assert [n for n in range(15) if f"{n}.1" in slots] == [5, 6, 7, 8, 9, 12]
    assert "x" not in slots


@pytest.mark.parametrize("name", ["", "x", ".1", "-1.1", "\u0661.1"])
def test_an_id_without_a_slot_is_skipped(name: str) -> None:
    slots = TrainedSlots().with_groups([name])
    assert slots.runs == ()
    assert name not in slots


def test_beyond_the_bound_the_oldest_hole_counts_as_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_slots, "RUNS", 2)
    groups = [f"{slot}.1" for slot in (0, 1, 5, 6, 9, 10)]
    assert TrainedSlots().with_groups(groups).runs == ((0, 6), (9, 10))
