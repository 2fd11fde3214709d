"""Ranges of a fetch: cut anywhere, read in any order; every byte is asked for once."""

import itertools
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.values import limits
from node.weights.transfer.ranges import LyingSourceError, Range, Transfer, Unasked
from support.weights import manifest_of_sizes as manifest


def transfer_of(sizes: list[int], span: Range) -> Transfer:
    """Return a transfer of which one range is all that is wanted, and is being read."""
    transfer = Transfer(
        manifest(sizes), lambda *_: None, deque(), Unasked(manifest(sizes), [], part_bytes=None)
    )
    transfer.reading.add(span)
    return transfer


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=20), data=st.data())
def test_however_frames_are_cut_into_ranges_every_byte_is_asked_for_once_and_frames_come_out_whole(
    sizes: list[int], data: st.DataObject
) -> None:
    payloads = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    part_bytes = data.draw(st.one_of(st.none(), st.integers(1, 100)))
    unasked = Unasked(manifest(sizes), range(len(sizes)), part_bytes=part_bytes)
    transfer = Transfer(manifest(sizes), lambda frame, payload: None, deque(), unasked)
    spans = []
    while (span := transfer.take(data.draw(st.integers(1, 500)))) is not None:
        spans.append(span)
        is_part = span.end_bytes > 0
        assert not (is_part and (part_bytes is None or len(span.frames) > 1))
    assert sum(span.left_bytes(manifest(sizes)) for span in spans) == sum(sizes)
    whole = []
    for span in data.draw(st.permutations(spans)):
        span.source = data.draw(st.sampled_from("ab"))
        while span.frames:
            frame, start = span.frames[0], span.next_bytes
            end = min(start + 150, span.end_bytes or sizes[frame])
            whole += transfer.arrive(span, frame, start, payloads[frame][start:end])
        transfer.leave(span)
    assert sorted((each.frame, each.payload) for each in whole) == list(enumerate(payloads))
    assert all(each.senders <= {"a", "b"} for each in whole)
    assert transfer.is_over


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), data=st.data())
def test_payloads_cut_into_any_chunks_are_put_together_again(sizes: list[int], data: st.DataObject) -> None:
    payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
    whole = b"".join(payloads)
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=10))})
    span = Range(deque(range(len(sizes))), source="hub")
    transfer, arrived = transfer_of(sizes, span), []
    for start, end in itertools.pairwise(cuts):
        frame = next(f for f in range(len(sizes)) if sum(sizes[: f + 1]) > start)
        arrived += transfer.arrive(span, frame, start - sum(sizes[:frame]), whole[start:end])
    assert [(each.frame, each.payload) for each in arrived] == list(enumerate(payloads))
    assert all(each.senders == {"hub"} for each in arrived)
    assert not span.frames


def test_small_and_large_pieces_of_a_payload_from_several_ranges_are_joined_in_order() -> None:
    size = 30_000
    payload = bytes(number % 251 for number in range(size))
    first, second = Range(deque([0]), 0, 10_000, source="a"), Range(deque([0]), 10_000, size, source="b")
    transfer = transfer_of([size], first)
    transfer.reading.add(second)
    arrived = []
    for start, end in ((0, 5000), (5000, 5001), (5001, 5002), (5002, 10_000)):
        arrived += transfer.arrive(first, 0, start, payload[start:end])
    for start, end in ((10_000, 10_100), (10_100, 20_000), (20_000, 20_001), (20_001, size)):
        arrived += transfer.arrive(second, 0, start, payload[start:end])
    assert [each.payload for each in arrived] == [payload]


@pytest.mark.parametrize(
    ("frame", "offset_bytes", "data"),
    [(1, 0, b"x"), (0, 1, b"x"), (0, 0, b""), (0, 0, b"x" * 8), (0, 0, b"x" * (limits.CHUNK_BYTES + 1))],
    ids=["another frame", "another offset", "nothing", "more than was asked for", "too large"],
)
def test_a_chunk_that_was_not_due_is_a_lie(frame: int, offset_bytes: int, data: bytes) -> None:
    span = Range(deque([0, 1]), source="hub")
    with pytest.raises(LyingSourceError):
        transfer_of([3, 4], span).arrive(span, frame, offset_bytes, data)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), data=st.data())
def test_after_forgetting_only_the_frame_that_a_part_was_cut_from_is_asked_for(
    sizes: list[int], data: st.DataObject
) -> None:
    unasked = Unasked(manifest(sizes), range(len(sizes)), part_bytes=data.draw(st.integers(1, 20)))
    cut = [unasked.cut(data.draw(st.integers(1, 60))) for _ in range(data.draw(st.integers(0, 5)))]
    unasked.forget()
    while (span := unasked.cut(7)) is not None:
        cut.append(span)
    asked = [0] * len(sizes)
    for span in filter(None, cut):
        for frame in span.frames:
            asked[frame] += span.left_bytes(manifest(sizes)) if len(span.frames) == 1 else sizes[frame]
    assert unasked.left_bytes == 0
    assert all(asked[frame] in (0, sizes[frame]) for frame in range(len(sizes)))
