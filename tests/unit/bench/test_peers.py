"""Figures of ``bench.peers``, and the frames that its peers speak in."""

from dataclasses import fields, replace
from typing import Any

import pytest

from bench.peer_lab.http2 import CallEndedError, Reader, frame, message
from bench.peers import PROMISED_PEERS, PROMISES, Row, broken_promises

BOUNDS: dict[str, Any] = dict(PROMISES)
FINE = replace(Row(*(0 for _ in fields(Row))), peers=PROMISED_PEERS, **BOUNDS)


def test_a_row_that_keeps_its_promises_breaks_none_and_smaller_fleets_promise_nothing() -> None:
    assert broken_promises(FINE) == []
    assert broken_promises(replace(FINE, peers=PROMISED_PEERS - 1, rss_mb=1e9, lost=5)) == []


@pytest.mark.parametrize("name", sorted(PROMISES))
def test_a_promise_that_is_broken_is_named_with_both_values(name: str) -> None:
    broken: dict[str, Any] = {name: PROMISES[name] * 2}
    (said,) = broken_promises(replace(FINE, **broken))
    assert (
        said == f"{PROMISED_PEERS} peers: {name} is {PROMISES[name] * 2:g}, promised are {PROMISES[name]:g}"
    )
    assert broken_promises(replace(FINE, lost=2)) == [f"{PROMISED_PEERS} peers: 2 connections were lost"]


def test_messages_arrive_whole_however_their_bytes_are_cut() -> None:
    sent = (
        message(3, b"one")
        + frame(4, 0, 0)
        + message(3, b"")
        + frame(6, 0, 0, b"12345678")
        + message(3, b"x" * 300)
    )
    reader, found, answered = Reader(unary=1), [], b""
    for byte in sent:
        messages, answer = reader.take(bytes((byte,)))
        found += messages
        answered += answer
    assert found == [(3, b"one"), (3, b""), (3, b"x" * 300)]
    assert answered == frame(4, 1, 0) + frame(6, 1, 0, b"12345678")


def test_a_unary_call_may_end_once_it_was_answered_and_no_other_call_may() -> None:
    trailers, reset = frame(1, 0x5, 1), frame(3, 0, 1, bytes(4))
    assert Reader(unary=1).take(message(1, b"answer") + trailers + reset)[0] == [(1, b"answer")]
    for ended in (trailers, reset, message(3, b"x") + frame(1, 0x5, 3), frame(7, 0, 0, bytes(8))):
        with pytest.raises(CallEndedError):
            Reader(unary=1).take(ended)
