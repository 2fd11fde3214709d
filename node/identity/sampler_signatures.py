"""Whether a sampler signed something that another peer hands in, by the certificate that comes with it.

A hub sees the TLS connection of the peer that calls it. Behind a relay that is the relay, so what is a
sampler's carries a proof of its own, which works after a restart and through any number of hubs.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from node.clock import moment
from node.errors import Reason, RefusedError
from node.identity.certificates import is_issued_by, peer_in, read_certificate
from node.identity.peer import Peer
from node.run import Role

ALGORITHM: Final = ec.ECDSA(hashes.SHA256())

CERTIFICATE_BYTES: Final = 4096
"""Five times what a certificate of a run has."""

_HOLDERS: Final = 4096
"""Certificates remembered as verified, by their PEM: checking one takes twice as long as a signature."""


@dataclass(frozen=True, slots=True)
class _Holder:
    peer: Peer
    key: ec.EllipticCurvePublicKey
    not_after_s: float


class SamplerSignatures:
    """Checks what samplers of one run have signed."""

    def __init__(self, ca_pem: bytes, *, run_id: str) -> None:
        self._run_id = run_id
        self._holder_of = lru_cache(maxsize=_HOLDERS)(lambda pem: _holder(pem, ca_pem))

    def check(
        self, what: str, sampler_id: str, *, certificate: bytes, signature: bytes, message: bytes, now: float
    ) -> None:
        """Check that a sampler signed ``message``. Raises RefusedError: BAD_SIGNATURE; names ``what``."""
        try:
            self._check(sampler_id, certificate, signature, message, now)
        except _UnprovedError as unproved:
            raise RefusedError(
                Reason.BAD_SIGNATURE,
                f"{what} is not proved to be its sampler's: {unproved}",
                fix="if a relay handed it in, check the relay's machine",
            ) from unproved

    def _check(
        self, sampler_id: str, certificate: bytes, signature: bytes, message: bytes, now: float
    ) -> None:
        if len(certificate) > CERTIFICATE_BYTES:
            raise _UnprovedError(f"its certificate has {len(certificate)} bytes")
        holder = self._holder_of(certificate)
        if holder.peer != Peer(self._run_id, Role.SAMPLER, sampler_id):
            raise _UnprovedError(
                f"it came as {sampler_id}'s and carries the certificate of {holder.peer.spiffe_id}"
            )
        if now >= holder.not_after_s:
            raise _UnprovedError(f"the certificate of {sampler_id} expired at {moment(holder.not_after_s)}")
        try:
            holder.key.verify(signature, message, ALGORITHM)
        except InvalidSignature:
            raise _UnprovedError(f"{sampler_id} did not sign it with these bytes") from None


class _UnprovedError(Exception):
    """Why a signature proves nothing."""


def _holder(certificate_pem: bytes, ca_pem: bytes) -> _Holder:
    try:
        certificate = read_certificate(certificate_pem)
        key = certificate.public_key()
    except ValueError as error:
        raise _UnprovedError("it carries no certificate") from error
    if not is_issued_by(certificate_pem, ca_pem) or not isinstance(key, ec.EllipticCurvePublicKey):
        raise _UnprovedError("its certificate is not of the run's authority")
    return _Holder(peer_in(certificate), key, certificate.not_valid_after_utc.timestamp())
