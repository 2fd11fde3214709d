"""Proof that a sampler itself made a group, whoever hands it in: its certificate, and a signature by its key.

A hub sees the TLS connection of the peer that calls it. Behind a relay that is the relay, so a group carries
its own proof, which works after a restart and through any number of hubs.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from node.clock import moment
from node.errors import Reason, RefusedError
from node.identity.certificates import is_issued_by, peer_in, read_certificate, read_curve_key
from node.identity.identity_store import Identity
from node.identity.peer import Peer
from node.rollout import EncodedGroup
from node.run import Role

_DOMAIN: Final = b"heterorl.v1.RolloutGroup\0"
_ALGORITHM: Final = ec.ECDSA(hashes.SHA256())

CERTIFICATE_BYTES: Final = 4096
"""Five times what a certificate of a run has."""

_HOLDERS: Final = 4096
"""Certificates remembered as verified, by their PEM: checking one takes twice as long as a signature."""


class GroupSigner:
    """Signs groups as one sampler."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._key = read_curve_key(identity.key_pem)

    def signed(self, group: EncodedGroup) -> EncodedGroup:
        """Return a group with its proof."""
        signature = self._key.sign(_signed_message(self._identity.run_id, group), _ALGORITHM)
        return replace(group, certificate=self._identity.certificate_pem, signature=signature)


@dataclass(frozen=True, slots=True)
class _Holder:
    peer: Peer
    key: ec.EllipticCurvePublicKey
    not_after_s: float


class GroupVerifier:
    """Checks the proofs of one run's groups."""

    def __init__(self, ca_pem: bytes, *, run_id: str) -> None:
        self._run_id = run_id
        self._holder_of = lru_cache(maxsize=_HOLDERS)(lambda pem: _holder(pem, ca_pem))

    def check(self, group: EncodedGroup, *, now: float) -> None:
        """Check that the sampler it names made the group. Raises RefusedError: BAD_SIGNATURE; it did not."""
        sampler_id = group.sampler_id
        if len(group.certificate) > CERTIFICATE_BYTES:
            raise _unproved(f"its certificate has {len(group.certificate)} bytes")
        holder = self._holder_of(group.certificate)
        if holder.peer != Peer(self._run_id, Role.SAMPLER, sampler_id):
            raise _unproved(
                f"it came as {sampler_id}'s and carries the certificate of {holder.peer.spiffe_id}"
            )
        if now >= holder.not_after_s:
            raise _unproved(f"the certificate of {sampler_id} expired at {moment(holder.not_after_s)}")
        try:
            holder.key.verify(group.signature, _signed_message(self._run_id, group), _ALGORITHM)
        except InvalidSignature:
            what = f"{sampler_id} did not sign group {group.group_id[:100]!r} with these bytes"
            raise _unproved(what) from None


def _holder(certificate_pem: bytes, ca_pem: bytes) -> _Holder:
    try:
        certificate = read_certificate(certificate_pem)
        key = certificate.public_key()
    except ValueError as error:
        raise _unproved("it carries no certificate") from error
    if not is_issued_by(certificate_pem, ca_pem) or not isinstance(key, ec.EllipticCurvePublicKey):
        raise _unproved("its certificate is not of the run's authority")
    return _Holder(peer_in(certificate), key, certificate.not_valid_after_utc.timestamp())


def _signed_message(run_id: str, group: EncodedGroup) -> bytes:
    # Neither id has a NUL in it once it is accepted, and digests have a fixed length.
    digests = b"".join(blake3.blake3(part).digest() for part in group.parts)
    return b"\0".join((_DOMAIN[:-1], run_id.encode(), group.group_id.encode(), digests))


def _unproved(what: str) -> RefusedError:
    return RefusedError(
        Reason.BAD_SIGNATURE,
        f"the group is not proved to be its sampler's: {what}",
        fix="sample it again; if a relay handed it in, check the relay's machine",
    )
