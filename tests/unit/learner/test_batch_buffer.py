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


@pytest.mark.parametrize(
    ("changes", "verdict", "told"),
    [
        ({"version": 4}, Verdict.STALE, "3 versions"),
        ({"task_digest": b"n"}, Verdict.FOREIGN, "6e"),
        ({"shut_out": {"liar": "it lies"}}, Verdict.SUSPECT, "liar is quarantined: it lies"),
        # Another sampler's group for the same slot was in the step before, and was thrown out too late.
        ({"trained_group_ids": TrainedSlots().with_groups(["5.1"])}, Verdict.DUPLICATE, ""),
    ],
    ids=["too old", "other options", "shut out", "trained on"],
)
def test_a_group_that_cannot_be_trained_on_any_more_is_given_up_with_the_reason(
    changes: dict[str, Any], verdict: Verdict, told: str
) -> None:
    buffer = buffer_of()
    hold(buffer, replace(make_group("5.2", version=1), sampler_id="liar"))
    hold(buffer, replace(make_group("6.1", version=2, task_digest=b"n"), sampler_id="honest"))
    assert evicted(buffer, version=3) == []
    [(name, judged, detail)] = evicted(buffer, **{"version": 3, **changes})
    assert (name, judged) == ("5.2", verdict)
    assert told in detail
    assert ids(buffer.take_batch(1)) == ["6.1"]


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
