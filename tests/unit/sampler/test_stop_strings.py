"""Tokens here are the bytes of UTF-8: a stop string always spans several, and a character may too."""

from hypothesis import example, given
from hypothesis import strategies as st

from sampler.engines.text.stop_strings import StopSearch, text_before_stop


class Bytes:
    """Decodes bytes, and counts the most it was asked to decode at once."""

    most = 0

    def __call__(self, token_ids: list[int]) -> str:
        self.most = max(self.most, len(token_ids))
        return bytes(token_ids).decode(errors="replace")


def stopped_after(data: bytes, *stop: str) -> int | None:
    """Return after how many bytes of ``data`` the search finds a stop string."""
    search = StopSearch(Bytes(), stop)
    return next((n for n, byte in enumerate(data, start=1) if search.append(byte)), None)


@given(
    st.text("ab日é\n", max_size=40),
    st.lists(st.text("ab日é\n", min_size=1, max_size=4), min_size=1, max_size=4),
)
@example("日本語", ["語", "日本"])
@example("abcd", ["cd", "bcd"])
def test_a_completion_stops_at_the_last_byte_of_a_stop_string_and_is_graded_up_to_the_first(
    text: str, stop: list[str]
) -> None:
    lengths = [len(text[:n].encode()) for n in range(len(text) + 1) if any(s in text[:n] for s in stop)]
    assert stopped_after(text.encode(), *stop) == min(lengths, default=None)
    begins = [n for n in range(len(text)) if text[n:].startswith(tuple(stop))]
    assert text_before_stop(text, tuple(stop)) == text[: min(begins, default=None)]
    assert text_before_stop(text, ()) == text


def test_bytes_that_are_no_text_are_never_decoded_many_at_once() -> None:
    decode = Bytes()
    search = StopSearch(decode, ["end"])
    assert not any(search.append(0xFF) for _ in range(1000))
    assert decode.most <= 32
    assert [search.append(byte) for byte in b"end"] == [False, False, True]


def test_a_stop_string_is_found_where_the_first_token_of_a_text_loses_its_space() -> None:
    words = ["▁a", "▁stop", "▁here"]

    def decode(token_ids: list[int]) -> str:
        return "".join(words[i] for i in token_ids).replace("▁", " ").removeprefix(" ")

    search = StopSearch(decode, ["a stop h"])
    assert [search.append(i) for i in range(3)] == [False, False, True]
