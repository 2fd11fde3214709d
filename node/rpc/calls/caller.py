"""The caller of an rpc: its name, its certificate.

The name comes from the certificate. With TLS off, which is allowed on loopback only, it comes from the user
agent: the one header that a channel adds to all its calls.
"""

import re
from typing import Any, Final

import grpc.aio
from cryptography import x509

from node.errors import Reason, RefusedError
from node.identity.peer import Peer

USER_AGENT_PREFIX: Final = "heterorl-peer="

_USER_AGENT: Final = re.compile(USER_AGENT_PREFIX + r"(\S{1,300})(?:\s|$)")

Context = grpc.aio.ServicerContext[Any, Any]


def peer_of(context: Context) -> Peer:
    """Return the caller of an rpc. Raises RefusedError: UNAUTHENTICATED; it has no name."""
    presented = context.auth_context()
    if b"insecure" in presented.get("transport_security_type", ()):
        metadata = dict(context.invocation_metadata() or ())
        match = _USER_AGENT.match(str(metadata.get("user-agent", "")))
        names = [match[1]] if match else []
    else:
        names = [name.decode("utf-8", "replace") for name in presented.get("peer_uri", ())]
    if len(names) != 1:
        raise RefusedError(
            Reason.UNAUTHENTICATED, "the caller has no certificate that names one peer", fix="enrol first"
        )
    return Peer.from_spiffe_id(names[0])


def certificate_of(context: Context) -> bytes:
    """Return the certificate, PEM, that the caller's connection was made with; empty where TLS is off."""
    return b"".join(context.auth_context().get("x509_pem_cert", ()))


def not_after_of(certificate_pem: bytes) -> float:
    """Return when a certificate expires, Unix seconds; infinite where there is none."""
    if not certificate_pem:
        return float("inf")
    return x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc.timestamp()
