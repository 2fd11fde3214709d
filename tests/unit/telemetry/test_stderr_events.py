"""What becomes of the text that native code writes to standard error."""

import pytest

from node.telemetry import stderr_events
from node.telemetry.stderr_events import (
    NATIVE,
    NATIVE_PER_MINUTE,
    PLAIN,
    PLAIN_PER_MINUTE,
    StderrEvent,
    StderrParser,
    StderrRepeatLimit,
)

HANDSHAKE = b"I1122 04:15:31.861022   32084 ssl_transport_security.cc:2563] Handshake failed with error X\n"
EARLY = b"E0000 00:00:1795316707.123456 99 chttp2_transport.cc:1435] ipv4:127.0.0.1:1: Received a GOAWAY\n"
TRACEBACK = b"Traceback (most recent call last):\n  File x, line 1\nValueError: broken\n"


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (
            HANDSHAKE,
            StderrEvent("info", NATIVE, "Handshake failed with error X", "ssl_transport_security.cc:2563"),
        ),
        (
            EARLY,
            StderrEvent("error", NATIVE, "ipv4:127.0.0.1:1: Received a GOAWAY", "chttp2_transport.cc:1435"),
        ),
    ],
)
def test_a_line_of_grpc_is_an_event_with_its_level_and_source(line: bytes, event: StderrEvent) -> None:
    assert StderrParser().feed(line) == [event]


def test_lines_that_come_together_are_one_event() -> None:
    text = StderrParser()
    assert text.feed(TRACEBACK) == []
    assert not text.is_empty
    assert text.flush() == [StderrEvent("warning", PLAIN, TRACEBACK.decode().strip())]
    assert text.is_empty


LOADING = "Loading safetensors checkpoint shards: {} Completed | {}/2 [00:01<00:00,  5.21it/s]"
CAPTURING = "Capturing CUDA graphs:  50%|█████     | 1/2 [00:00<?, ?it/s]"


def test_progress_bars_are_no_warning_and_one_event_says_how_far_the_last_one_is() -> None:
    text = StderrParser()
    bars = "\r".join([CAPTURING, LOADING.format(" 50%", 1), LOADING.format("100%", 2)])
    assert text.feed(f"\r{bars}\n".encode()) == []
    assert text.flush() == [StderrEvent("info", PLAIN, LOADING.format("100%", 2))]


def test_a_warning_among_progress_bars_stays_a_warning() -> None:
    text = StderrParser()
    text.feed(f"out of memory\r{CAPTURING}\n".encode())
    assert text.flush() == [StderrEvent("warning", PLAIN, "out of memory")]


def test_what_came_before_a_line_of_grpc_is_told_before_it() -> None:
    plain, native = StderrParser().feed(b"double free\n" + HANDSHAKE)
    assert (plain.text, native.event) == ("double free", NATIVE)


def test_a_line_may_come_in_pieces_and_without_an_end() -> None:
    text = StderrParser()
    assert text.feed(HANDSHAKE[:20]) == []
    assert [event.event for event in text.feed(HANDSHAKE[20:])] == [NATIVE]
    text.feed(b"Aborted")
    assert [event.text for event in text.flush()] == ["Aborted"]


def test_nothing_is_told_of_empty_lines_and_of_the_preamble_of_abseil() -> None:
    text = StderrParser()
    text.feed(b"\n\nWARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
    assert text.flush() == []


def test_memory_is_bounded_whether_or_not_lines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr_events, "TEXT_BYTES", 100)
    for piece in (b"x" * 30, b"xxx\n" * 8):
        text = StderrParser()
        told = [event for _ in range(100) for event in text.feed(piece)]
        assert len(told) > 10
        assert all(len(event.text) < 300 for event in told)


def test_a_text_is_split_once_it_is_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr_events, "TEXT_BYTES", 10)
    text = StderrParser()
    for _ in range(2):
        assert text.feed(b"1234\n1234\n") == []
        assert [event.text for event in text.feed(b"\n")] == ["1234\n1234"]
        assert text.is_empty
    assert text.feed(b"x" * 10) == []
    assert [event.text for event in text.feed(b"y")] == ["xxxxxxxxxxy"]
    assert text.is_empty


def test_bytes_that_are_no_text_are_told_all_the_same() -> None:
    text = StderrParser()
    text.feed(b"\xff\xfe\n")
    assert text.flush()[0].text == "\ufffd\ufffd"


def test_a_place_that_repeats_is_told_some_times_a_minute_and_then_counted() -> None:
    bound, [event] = StderrRepeatLimit(), StderrParser().feed(HANDSHAKE)
    assert len(list(bound.passed([event] * 1000, now=0))) == NATIVE_PER_MINUTE
    assert list(bound.passed([event], now=59.9)) == []
    summary, again = bound.passed([event], now=60)
    assert f"{1001 - NATIVE_PER_MINUTE} more" in summary.text
    assert (summary.source, again) == (event.source, event)


def test_plain_text_is_told_more_often_and_does_not_silence_grpc() -> None:
    bound, [event] = StderrRepeatLimit(), StderrParser().feed(HANDSHAKE)
    plain = StderrEvent("warning", PLAIN, "double free")
    assert len(list(bound.passed([plain] * 1000, now=0))) == PLAIN_PER_MINUTE
    assert list(bound.passed([event], now=0)) == [event]
    assert list(bound.passed([plain], now=59.9)) == []
    summary, again = bound.passed([plain], now=60)
    assert (summary.level, summary.event, summary.source) == ("warning", PLAIN, "")
    assert f"{1001 - PLAIN_PER_MINUTE} more" in summary.text
    assert again == plain
