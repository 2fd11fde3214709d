"""Stop strings, found in the text of a completion as it grows and cut off before the text is graded.

A token may hold part of a character, and a stop string may span tokens. So each new token is decoded together
with the few before it, and as much text is kept as a stop string may have begun in. Both are bounded, so the
cost of a token does not grow with the completion.
"""

from collections.abc import Callable, Sequence
from typing import Final

_WINDOW_TOKENS: Final = 16
"""Most tokens that may wait for the rest of a character. UTF-8 has at most 4 bytes; a longer wait means bytes
that are no text, or padding, which has none."""

_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """Return ``text`` up to the first stop string in it, or all of it if there is none."""
    starts = (text.find(string) for string in stop)
    return text[: min((start for start in starts if start >= 0), default=len(text))]


class StopSearch:
    """Looks for stop strings in one completion, token by token."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str]) -> None:
        """Start with an empty completion and at least one stop string, none of them empty."""
        self._decode = decode
        self._stop = stop
        self._kept_characters = max(map(len, stop)) - 1
        self._text = ""
        """The newest of the text, in which a stop string may have begun."""
        self._window: list[int] = []
        """The newest tokens; those from ``_read`` on are not in ``_text`` yet."""
        self._read = 0

    def append(self, token_id: int) -> bool:
        """Add a token; return whether the completion now contains a stop string."""
        self._window.append(token_id)
        before = self._decode(self._window[: self._read])
        whole = self._decode(self._window)
        is_complete = len(whole) > len(before) and not whole.endswith(_INCOMPLETE)
        if not is_complete and len(self._window) - self._read < _WINDOW_TOKENS:
            return False
        # What was read stays for one more round: some tokenizers drop the space before a first token.
        self._window = self._window[self._read :]
        self._read = len(self._window)
        text = self._text + whole[len(before) :]
        self._text = text[max(0, len(text) - self._kept_characters) :]
        return any(string in text for string in self._stop)
