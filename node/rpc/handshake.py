"""A TLS handshake that shows what gRPC hides: which side refused the other, and for which dates.

A gRPC server that rejects a certificate closes the connection without an alert, and the client reports
"Socket closed", as for everything else. In this handshake the hub proves itself first; a hub that then closes
without its HTTP/2 preface has refused this peer's certificate.
"""

import asyncio
import enum
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.identity.certificates import read_certificate
from node.identity.clock_skew import Window
from node.identity.identity_store import Identity
from node.identity.peer import hub_name
from node.rpc.address import split_target

TIMEOUT_S: Final = 5.0
"""For connection, handshake and the hub's first bytes together: three round trips of the slowest link."""


class Outcome(enum.Enum):
    """How a handshake ended."""

    ACCEPTED = enum.auto()
    """Both sides accept each other; the call failed for another reason."""
    REFUSED = enum.auto()
    """The hub belongs to this run and closed the connection because of this peer's certificate."""
    HUB_NOT_VALID = enum.auto()
    """The hub's certificate belongs to this run and is not valid now, by this machine's clock."""
    UNKNOWN = enum.auto()
    """No server, a server of another run, or no answer in time."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """The result of a handshake."""

    outcome: Outcome
    hub: Window | None = None
    """When the hub's certificate is valid, if it was not."""


_DATES: Final = frozenset({9, 10})
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


async def shake_hands(target: str, identity: Identity) -> Handshake:
    """Connect to the hub at ``target`` once, send no request, and return what happened."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _shake_hands(target, identity)
    except (OSError, TimeoutError, ValueError):
        return Handshake(Outcome.UNKNOWN)


async def _shake_hands(target: str, identity: Identity) -> Handshake:
    try:
        first_bytes = await _connect(target, identity, _context(identity))
    except ssl.SSLCertVerificationError as error:
        if error.verify_code not in _DATES:
            return Handshake(Outcome.UNKNOWN)
        return Handshake(Outcome.HUB_NOT_VALID, await _dates_of_hub(target, identity))
    return Handshake(Outcome.ACCEPTED if first_bytes else Outcome.REFUSED)


async def _connect(target: str, identity: Identity, context: ssl.SSLContext) -> bytes:
    """Return the first byte the hub sends; empty where it closes instead."""
    host, port = split_target(target)
    reader, writer = await asyncio.open_connection(
        host, port, ssl=context, server_hostname=hub_name(identity.run_id)
    )
    try:
        return await reader.read(1)
    except (ssl.SSLError, ConnectionError):
        return b""  # a hub that does send an alert
    finally:
        writer.transport.abort()


async def _dates_of_hub(target: str, identity: Identity) -> Window:
    """Return when the hub's certificate is valid; its signature has been checked already."""
    context = _context(identity)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    host, port = split_target(target)
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    certificate = read_certificate(ssl.DER_cert_to_PEM_cert(der).encode())
    return Window(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


def _context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=identity.ca_pem.decode())
    context.set_alpn_protocols(["h2"])
    # The ssl module reads keys from files only; this file is private and removed at once.
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "identity.pem"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity.key_pem + identity.certificate_pem)
        context.load_cert_chain(path)
    return context
