"""The server name at the beginning of a TLS connection, which is sent in the clear; pure.

    record: type 22, version, length, | handshake: type 1, length, | ClientHello: ..., extensions: | 0: name

It says whom a client wants, and proves nothing: the certificate of whoever answers does that (RFC 8446,
4.1.2; RFC 6066, 3).
"""

from typing import Final

MOST_BYTES: Final = 16 << 10
"""Longest beginning that is read; gRPC's has 300 to 2000 bytes."""

_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_HOST_NAME: Final = 0


class _Fields:
    """Reads numbers and texts of a message, one after the other. Raises ValueError: it ends too soon."""

    def __init__(self, message: bytes) -> None:
        self._left = message

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self, size_bytes: int) -> bytes:
        if len(self._left) < size_bytes:
            raise ValueError("a TLS handshake with a part that ends too soon")
        taken, self._left = self._left[:size_bytes], self._left[size_bytes:]
        return taken

    def number(self, size_bytes: int) -> int:
        return int.from_bytes(self.take(size_bytes))

    def block(self, length_bytes: int) -> bytes:
        """Return a part that has its length before it."""
        return self.take(self.number(length_bytes))


def server_name_in(received: bytes) -> str | None:
    """Return the server name that a connection begins with; empty: it names none; None: more must come.

    Raises ValueError: this is not how TLS begins.
    """
    handshake = b""
    at = 0
    while len(received) >= at + 5:
        if received[at] != _HANDSHAKE or received[at + 1] != 3:
            raise ValueError("a connection that does not begin as TLS does")
        length = int.from_bytes(received[at + 3 : at + 5])
        handshake += received[at + 5 : at + 5 + length]
        if handshake and handshake[0] != _CLIENT_HELLO:
            raise ValueError("a TLS connection that does not begin with a client's hello")
        if len(handshake) >= 4 and len(handshake) >= 4 + int.from_bytes(handshake[1:4]):
            return _name_in(_Fields(handshake[4 : 4 + int.from_bytes(handshake[1:4])]))
        at += 5 + length
    if received and received[0] != _HANDSHAKE:
        raise ValueError("a connection that does not begin as TLS does")
    return None


def _name_in(hello: _Fields) -> str:
    hello.take(2 + 32)  # version, random
    hello.block(1)  # session
    hello.block(2)  # ciphers
    hello.block(1)  # compression
    extensions = _Fields(hello.block(2) if hello else b"")
    while extensions:
        kind, content = extensions.number(2), extensions.block(2)
        if kind == _SERVER_NAME:
            names = _Fields(_Fields(content).block(2))
            while names:
                name_kind, name = names.number(1), names.block(2)
                if name_kind == _HOST_NAME:
                    return name.decode("ascii", "replace").lower()
    return ""
