"""A verdict is told until it was heard."""

from hypothesis import given
from hypothesis import strategies as st

from node.coordinator.fleet.heartbeats import PendingVerdicts
from node.values.groups.verdict import GroupVerdict, Verdict


def judgement(number: int) -> GroupVerdict:
    return GroupVerdict(f"{number}.1", Verdict.TRAINED)


def numbers(told: tuple[GroupVerdict, ...]) -> list[int]:
    return [int(one.group_id.partition(".")[0]) for one in told]


def pending_of(count: int, *, capacity: int = 10) -> PendingVerdicts:
    pending = PendingVerdicts(capacity=capacity)
    for number in range(count):
        pending.put(judgement(number))
    return pending


def test_the_oldest_go_when_it_is_full_even_where_they_were_told() -> None:
    pending = pending_of(3, capacity=3)
    pending.take(2, has_heard=False)
    assert pending.put(judgement(3)) == 1
    # 0 was dropped; of what was told only 1 is left to be acknowledged.
    assert numbers(pending.take(3, has_heard=True)) == [2, 3]


def test_what_was_never_told_is_not_taken_for_heard_when_an_older_one_is_dropped() -> None:
    pending = pending_of(2, capacity=2)
    assert pending.put(judgement(2)) == 1
    assert numbers(pending.take(2, has_heard=True)) == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["lost", "cut", "heard"])), max_size=30))
def test_a_sampler_that_passes_over_what_the_last_answer_told_hears_everything_once(
    turns: list[tuple[int, str]],
) -> None:
    """Answers are lost, or arrive and the stream is cut before the next heartbeat says so."""
    pending, put, heard = PendingVerdicts(capacity=1000), 0, list[int]()
    has_heard = False
    last: list[int] = []
    for count, fate in [*turns, *[(0, "heard")] * 50]:
        for _ in range(count):
            pending.put(judgement(put))
            put += 1
        told = numbers(pending.take(2, has_heard=has_heard))
        if fate != "lost":
            heard += [number for number in told if number not in last]
            last = told
        has_heard = fate == "heard"
    assert heard == list(range(put))
