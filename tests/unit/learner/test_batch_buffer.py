from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from learner.intake.batch_buffer import BatchBuffer
from learner.intake.trained_slots import TrainedSlots
from node.values.groups.rollout import EncodedGroup, RolloutGroup
from node.values.groups.verdict import Verdict
from support.groups import make_group
from support.refusals import naming


def hold(buffer: BatchBuffer, group: RolloutGroup) -> None:
    buffer.arrive(arrived(group.group_id))
    buffer.admit(group)


def arrived(group_id: str) -> EncodedGroup:
    return EncodedGroup(b"header", b"columns", group_id, "sampler")


def buffer_of(*groups: tuple[str, int], capacity: int = 8) -> BatchBuffer:
    buffer = BatchBuffer(capacity_groups=capacity)
    for group_id, version in groups:
        hold(buffer, make_group(group_id, version=version))
    return buffer


def evicted(buffer: BatchBuffer, *, version: int = 1, **changes: Any) -> list[tuple[str, Verdict, str]]:
    nothing: dict[str, Any] = {"task_digest": None, "shut_out": {}, "trained_group_ids": ()}
    found = buffer.evict(version=version, max_staleness_versions=2, **(nothing | changes))
    assert all(group.group_id == judged.group_id for group, judged in found)
    return [(judged.group_id, judged.verdict, judged.detail) for _, judged in found]


def ids(batch: tuple[RolloutGroup, ...]) -> list[str]:
    return [one.group_id for one in batch]


def test_a_batch_waits_until_it_is_whole() -> None:
    buffer = buffer_of(("a", 0))
    assert buffer.take_batch(2) == ()
    assert len(buffer) == 1


def test_the_oldest_policy_goes_first_and_then_the_first_to_arrive() -> None:
    buffer = buffer_of(("new", 3), ("old", 1), ("older", 0), ("old-too", 1))
    assert ids(buffer.take_batch(2)) == ["older", "old"]
    assert ids(buffer.take_batch(2)) == ["old-too", "new"]
    assert ids(buffer.take_batch(2)) == []


def test_what_has_arrived_is_in_no_batch_before_it_is_admitted() -> None:
    buffer = buffer_of(("a", 0))
    for name in ("b", "c"):
        buffer.arrive(arrived(name))
    assert buffer.take_batch(2) == ()
    assert [one.group_id for one in buffer.arrived] == ["b", "c"]
    assert evicted(buffer, version=9) == [("a", Verdict.STALE, mock.ANY)]
    buffer.refuse("b")
    buffer.admit(make_group("c"))
    assert (buffer.arrived, len(buffer), ids(buffer.take_batch(1))) == ((), 1, ["c"])


def test_a_group_is_given_up_as_soon_as_its_staleness_is_beyond_the_bound() -> None:
    buffer = buffer_of(("old", 1), ("new", 2))
    assert evicted(buffer, version=3) == []
    [(name, verdict, detail)] = evicted(buffer, version=4)
    assert (name, verdict) == ("old", Verdict.STALE)
    assert "3 versions" in detail
    assert len(buffer) == 1


@pytest.mark.parametrize("is_judged", [False, True])
def test_nothing_is_taken_in_beyond_the_room_that_was_promised_or_twice(is_judged: bool) -> None:
    buffer = buffer_of(("a", 0), capacity=2)
    buffer.arrive(arrived("b"))
    if is_judged:
        buffer.admit(make_group("b"))
    for name, told in (("b", "group b"), ("c", "2 groups")):
        with naming(ValueError, told):
            buffer.arrive(arrived(name))
    assert len(buffer) == 2


def test_groups_graded_by_options_that_have_changed_are_given_up_and_not_trained_on() -> None:
    buffer = buffer_of(("old", 1))
    hold(buffer, make_group("new", task_digest=b"n"))
    [(name, verdict, detail)] = evicted(buffer, task_digest=b"n")
    assert (name, verdict) == ("old", Verdict.FOREIGN)
    assert "6e" in detail
    assert len(buffer) == 1


def test_groups_of_a_sampler_that_is_shut_out_are_given_up_and_not_trained_on() -> None:
    buffer = buffer_of()
    hold(buffer, replace(make_group("false"), sampler_id="liar"))
    hold(buffer, replace(make_group("true"), sampler_id="honest"))
    [(name, verdict, detail)] = evicted(buffer, shut_out={"liar": "it lies"})
    assert (name, verdict) == ("false", Verdict.SUSPECT)
    assert "liar" in detail
    assert "it lies" in detail
    assert len(buffer) == 1


def test_a_group_whose_slot_was_trained_on_since_is_given_up() -> None:
    """Another sampler's group for the same slot was in the step before, and was thrown out too late."""
    buffer = buffer_of(("5.2", 0), ("6.1", 0), ("7.1", 0))
    trained = TrainedSlots().with_groups(["5.1"])
    [(name, verdict, _)] = evicted(buffer, trained_group_ids=trained)
    assert (name, verdict) == ("5.2", Verdict.DUPLICATE)
    assert ids(buffer.take_batch(2)) == ["6.1", "7.1"]
