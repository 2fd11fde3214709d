"""As much of HTTP/2 and gRPC as a client needs that opens two calls and sends small messages.

gRPC's own client costs 200 kB and as much processor time as the server for each connection; this one costs a
fifth, so that a generator shares two cores with the coordinator that is measured. It opens the connection's
flow-control windows once, for good, and reads DATA, SETTINGS, PING, RST_STREAM and GOAWAY; headers are passed
over, and trailers count as the end of their call.
"""

import struct
from collections.abc import Iterator
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_LARGEST_WINDOW: Final = (1 << 31) - 1
_FIRST_WINDOW: Final = (1 << 16) - 1
_HEADER_BYTES: Final = 9
_PREFIX_BYTES: Final = 5


class CallEndedError(Exception):
    """The server ended a call, or the connection."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def greeting() -> bytes:
    """Return the first bytes of a connection: the preface, and windows that never need to grow again."""
    return (
        PREFACE
        + frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, _LARGEST_WINDOW))
        + frame(_WINDOW, 0, 0, struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW))
    )


def call(stream: int, path: str, authority: str) -> bytes:
    """Return the HEADERS frame that begins a call; ``stream`` is odd and higher than those before."""
    headers = (
        b"\x83\x87"  # :method POST, :scheme https
        + b"\x04" + _text(path)
        + b"\x01" + _text(authority)
        + b"\x00" + _text("te") + _text("trailers")
        + b"\x0f\x10" + _text("application/grpc")
    )  # fmt: skip
    return frame(_HEADERS, _END_HEADERS, stream, headers)


def message(stream: int, content: bytes, *, is_last: bool = False) -> bytes:
    """Return the DATA frame of one message, of at most 16 kB."""
    flags = _END_STREAM if is_last else 0
    return frame(_DATA, flags, stream, struct.pack(">BI", 0, len(content)) + content)


class Reader:
    """Takes in the bytes of a connection; returns messages, and what to answer by itself."""

    def __init__(self, *, unary: int) -> None:
        """Begin; the stream ``unary`` has one answer, and may end once that is here."""
        self._unary = unary
        self._is_answered = False
        self._bytes = bytearray()
        self._parts: dict[int, bytearray] = {}
        """Stream -> bytes of a message that has not arrived whole."""

    def take(self, data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
        """Return the messages that are whole now, each with its stream, and the bytes to send in answer.

        Raises:
            CallEndedError: A call has trailers or was reset, or the server says goodbye.
        """
        self._bytes += data
        messages: list[tuple[int, bytes]] = []
        answer = b""
        while len(self._bytes) >= _HEADER_BYTES:
            size = int.from_bytes(self._bytes[:3], "big")
            if len(self._bytes) < _HEADER_BYTES + size:
                break
            kind, flags, stream = struct.unpack_from(">BBI", self._bytes, 3)
            payload = bytes(self._bytes[_HEADER_BYTES : _HEADER_BYTES + size])
            del self._bytes[: _HEADER_BYTES + size]
            if kind == _DATA:
                messages += [(stream, one) for one in self._messages(stream, payload)]
            elif kind == _SETTINGS and not flags & _ACK:
                answer += frame(_SETTINGS, _ACK, 0)
            elif kind == _PING and not flags & _ACK:
                answer += frame(_PING, _ACK, 0, payload)
            elif kind == _GOAWAY or (
                (kind == _RESET or (kind == _HEADERS and flags & _END_STREAM))
                and not (stream == self._unary and self._is_answered)
            ):
                raise CallEndedError(f"frame of kind {kind} on stream {stream}: {payload[:300]!r}")
        return messages, answer

    def _messages(self, stream: int, payload: bytes) -> Iterator[bytes]:
        part = self._parts.setdefault(stream, bytearray())
        part += payload
        while len(part) >= _PREFIX_BYTES:
            size = int.from_bytes(part[1:_PREFIX_BYTES], "big")
            if len(part) < _PREFIX_BYTES + size:
                break
            self._is_answered = self._is_answered or stream == self._unary
            yield bytes(part[_PREFIX_BYTES : _PREFIX_BYTES + size])
            del part[: _PREFIX_BYTES + size]
        if not part:
            del self._parts[stream]


def _text(text: str) -> bytes:
    """Return a string literal of HPACK, uncompressed."""
    content = text.encode()
    if len(content) < 127:
        return bytes((len(content),)) + content
    rest, length = len(content) - 127, b"\x7f"
    while rest >= 128:
        length, rest = length + bytes((rest % 128 + 128,)), rest // 128
    return length + bytes((rest,)) + content
