"""The order of payloads on the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.values.policy import NO_BASE
from node.weights.transfer import payload_order
from node.weights.transfer.payload_order import fetch_order, first_batch, largest_first, pushed_frames
from support.weights import manifest_of_sizes as manifest

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@given(sizes=SIZES, most_bytes=st.integers(0, 100), here=st.sets(st.integers(0, 29)))
def test_a_batch_is_all_that_is_here_and_fits_and_never_nothing(
    sizes: list[int], most_bytes: int, here: set[int]
) -> None:
    frames = range(len(sizes))
    batch = first_batch(manifest(sizes), frames, most_bytes=most_bytes, is_here=here.__contains__)
    assert batch == tuple(range(len(batch)))
    assert len(batch) == 1 or (sum(sizes[f] for f in batch) <= most_bytes and set(batch[1:]) <= here)
    if len(batch) < len(sizes):
        assert len(batch) not in here or sum(sizes[: len(batch) + 1]) > most_bytes


@given(sizes=SIZES, most_bytes=st.integers(0, 200))
def test_what_is_pushed_is_the_longest_start_that_fits_of_the_frames_largest_first(
    sizes: list[int], most_bytes: int
) -> None:
    pushed = pushed_frames(manifest(sizes), most_bytes=most_bytes)
    in_order = largest_first(manifest(sizes), range(len(sizes)))
    assert [sizes[frame] for frame in in_order] == sorted(sizes, reverse=True)
    assert list(pushed) == in_order[: len(pushed)]
    assert sum(sizes[frame] for frame in pushed) <= most_bytes
    rest = in_order[len(pushed) :]
    assert not rest or sizes[rest[0]] == 0 or sum(sizes[f] for f in pushed) + sizes[rest[0]] > most_bytes


@given(sizes=st.lists(st.integers(1, 3 << 20), min_size=1, max_size=30))
def test_everyone_fetches_the_smallest_until_it_is_enough_to_begin_with_then_the_largest(
    sizes: list[int],
) -> None:
    order = fetch_order(manifest(sizes), range(len(sizes)))
    assert sorted(order) == list(range(len(sizes)))
    fetched = [sizes[frame] for frame in order]
    opening = next((n for n in range(len(sizes)) if sum(fetched[:n]) >= 2 << 20), len(sizes))
    assert fetched[:opening] == sorted(sizes)[:opening]
    assert fetched[opening:] == sorted(fetched[opening:], reverse=True)


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ([30, 5, 20, 5], [3, 1, 0, 2]),
        ([40, 4, 20, 5, 30], [1, 3, 2, 0, 4]),
        ([10, 50], [0, 1]),
    ],
)
def test_a_fetch_opens_with_the_smallest_frames_of_some_bytes(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], order: list[int]
) -> None:
    monkeypatch.setattr(payload_order, "OPENING_BYTES", 10)
    assert fetch_order(manifest(sizes), range(len(sizes))) == order


@pytest.mark.parametrize(("cost_bytes", "pushed"), [(6, ()), (7, (1, 0)), (8, (1, 0))])
def test_a_keyframe_that_takes_less_than_asking_for_it_is_pushed(
    cost_bytes: int, pushed: tuple[int, ...]
) -> None:
    keyframe = manifest([3, 4], base_version=NO_BASE)
    assert pushed_frames(keyframe, most_bytes=100, artifact_cost_bytes=cost_bytes) == pushed
    assert pushed_frames(manifest([1], base_version=NO_BASE), most_bytes=100) == ()
