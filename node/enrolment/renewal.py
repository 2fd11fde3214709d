"""The coordinator's half of a certificate's renewal: a member that joins late in its certificate's time gets
the next one with the answer, for the same name and key.

    peer --Join, by the old certificate--> coordinator --JoinResponse.certificate--> peer

A member joins again on its own once its certificate is due, so that no token and no operator is needed. A
relay that release 0.3 enrolled has the coordinator's name in its certificate, and a learner none: each gets
one with the name by which its role is dialled at its first join as 0.4.
"""

import logging
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from node.enrolment.authority import present_authority
from node.errors import StartupError
from node.identity.certificates import peer_in, read_certificate
from node.identity.own_identity import RenewedCertificates, is_due
from node.identity.peer import SERVING_ROLES, Peer, server_name
from node.system.clock import Clock
from node.values.protocol import SPLICED

logger = logging.getLogger(__name__)

NOT_RENEWED: Final = b""


class Renewal:
    """Makes members' certificates anew."""

    def __init__(
        self, authority: Path, renewed: RenewedCertificates, *, lifetime_s: float, clock: Clock
    ) -> None:
        """Issue with the authority in a directory, for ``lifetime_s`` each; note them in ``renewed``."""
        self._authority = authority
        self._renewed = renewed
        self._lifetime_s = lifetime_s
        self._clock = clock

    def certificate_for(self, peer: Peer, certificate_pem: bytes, *, protocol: int) -> bytes:
        """Return a new certificate for a peer that has proved the key of this one; empty where none is due.

        Empty, too, while the authority's key is not on this machine, and where TLS is off.

        Args:
            protocol: The newest that the peer speaks.
        """
        if not certificate_pem:
            return NOT_RENEWED
        certificate, now = read_certificate(certificate_pem), self._clock.now()
        not_before_s = certificate.not_valid_before_utc.timestamp()
        not_after_s = certificate.not_valid_after_utc.timestamp()
        key = certificate.public_key()
        if (
            not isinstance(key, ec.EllipticCurvePublicKey)
            or peer_in(certificate) != peer
            or not (is_due(not_before_s, not_after_s, now=now) or _lacks_name(certificate, peer, protocol))
        ):
            return NOT_RENEWED
        about = {"node_id": peer.node_id, "expires_in_s": round(not_after_s - now)}
        try:
            authority = present_authority(self._authority)
        except StartupError as error:  # the member is let in all the same
            logger.error("certificate not renewed", extra={**about, "detail": str(error)})
            return NOT_RENEWED
        if authority is None:
            logger.warning("certificate not renewed: the authority's key is not here", extra=about)
            return NOT_RENEWED
        renewed_pem = authority.issue(peer, key, now=now, lifetime_s=self._lifetime_s)
        self._renewed.note(renewed_pem, now=now)
        logger.info("certificate renewed", extra={"node_id": peer.node_id, "role": peer.role})
        return renewed_pem


def _lacks_name(certificate: x509.Certificate, peer: Peer, protocol: int) -> bool:
    if peer.role not in SERVING_ROLES or protocol < SPLICED:
        return False
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return server_name(peer.run_id, peer.role) not in names.get_values_for_type(x509.DNSName)
