from dataclasses import replace

import pytest

from learner.intake.batch_buffer import BatchBuffer
from learner.intake.trained_slots import TrainedSlots
from node.rollout import RolloutGroup
from node.verdict import Verdict
from support.groups import make_group
from support.refusals import naming


def delivered(group_id: str, version: int) -> RolloutGroup:
    return make_group(group_id, version=version)


def buffer_of(*groups: tuple[str, int], capacity: int = 8, batch: int = 2) -> BatchBuffer:
    buffer = BatchBuffer(capacity_groups=capacity, batch_groups=batch, max_staleness_versions=2)
    for group_id, version in groups:
        buffer.add(delivered(group_id, version))
    return buffer


def ids(batch: tuple[RolloutGroup, ...]) -> list[str]:
    return [one.group_id for one in batch]


def test_a_batch_waits_until_it_is_whole() -> None:
    buffer = buffer_of(("a", 0))
    assert buffer.take_batch() == ()
    assert len(buffer) == 1


def test_the_oldest_policy_goes_first_and_then_the_first_to_arrive() -> None:
    buffer = buffer_of(("new", 3), ("old", 1), ("older", 0), ("old-too", 1))
    assert ids(buffer.take_batch()) == ["older", "old"]
    assert ids(buffer.take_batch()) == ["old-too", "new"]
    assert ids(buffer.take_batch()) == []


def test_a_group_is_given_up_as_soon_as_its_staleness_is_beyond_the_bound() -> None:
    buffer = buffer_of(("old", 1), ("new", 2))
    assert buffer.evict(version=3, task_digest=None, shut_out={}, trained_group_ids=()) == []
    [(evicted, judged)] = buffer.evict(version=4, task_digest=None, shut_out={}, trained_group_ids=())
    assert evicted.group_id == "old"
    assert judged.verdict is Verdict.STALE
    assert "3 versions" in judged.detail
    assert len(buffer) == 1


def test_nothing_is_taken_in_beyond_the_room_that_was_promised() -> None:
    with naming(ValueError, "2 groups"):
        buffer_of(("a", 0), ("b", 0), ("c", 0), capacity=2)


def test_a_group_is_held_once() -> None:
    with naming(ValueError, "group a"):
        buffer_of(("a", 0), ("a", 0))


@pytest.mark.parametrize(("capacity", "batch"), [(1, 2), (1, 0)])
def test_a_buffer_that_never_fills_a_batch_is_refused(capacity: int, batch: int) -> None:
    with naming(ValueError, "1", str(batch)):
        buffer_of(capacity=capacity, batch=batch)
    assert ids(buffer_of(("a", 0), capacity=1, batch=1).take_batch()) == ["a"]


def test_groups_graded_by_options_that_have_changed_are_given_up_and_not_trained_on() -> None:
    buffer = buffer_of(("old", 1))
    buffer.add(make_group("new", task_digest=b"n"))
    [(evicted, judged)] = buffer.evict(version=1, task_digest=b"n", shut_out={}, trained_group_ids=())
    assert (evicted.group_id, judged.verdict) == ("old", Verdict.FOREIGN)
    assert judged.detail == (
        "it was graded by task options without a digest, the run's are 6e, "
        "as the coordinator's configuration says"
    )
    assert len(buffer) == 1


def test_groups_of_a_sampler_that_is_shut_out_are_given_up_and_not_trained_on() -> None:
    buffer = buffer_of()
    buffer.add(replace(make_group("false"), sampler_id="liar"))
    buffer.add(replace(make_group("true"), sampler_id="honest"))
    [(evicted, judged)] = buffer.evict(
        version=1, task_digest=None, shut_out={"liar": "it lies"}, trained_group_ids=()
    )
    assert (evicted.group_id, judged.verdict) == ("false", Verdict.SUSPECT)
    assert judged.detail == "liar is quarantined: it lies"
    assert len(buffer) == 1


def test_a_group_whose_slot_was_trained_on_since_is_given_up() -> None:
    """Another sampler's group for the same slot was in the step before, and was thrown out too late."""
    buffer = buffer_of(("5.2", 0), ("6.1", 0), ("7.1", 0))
    trained = TrainedSlots().with_groups(["5.1"])
    [(evicted, judged)] = buffer.evict(version=1, task_digest=None, shut_out={}, trained_group_ids=trained)
    assert (evicted.group_id, judged.verdict) == ("5.2", Verdict.DUPLICATE)
    assert ids(buffer.take_batch()) == ["6.1", "7.1"]
