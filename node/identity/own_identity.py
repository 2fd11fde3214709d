"""A process's own identity while it runs: its certificate is made anew before it expires.

    good --two thirds of its time are over--> due --with an answer to Join--> good, for the same key

The key stays, so that what it signed stays signed. Calls that have begun go on over the connections that they
have; new connections present the new certificate.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from node.errors import Reason, RefusedError
from node.identity.certificates import CLOCK_SKEW_S, is_issued_by, read_certificate
from node.identity.files import write_public
from node.identity.identity_store import CERTIFICATE_FILE, Identity, make_identity

LAST_PART: Final = 1 / 3
"""Part of a certificate's time in which it is made anew."""


class OwnIdentity:
    """An identity and the directory it is kept in; used on the event loop's thread."""

    def __init__(self, identity: Identity, directory: Path) -> None:
        self.current = identity
        self.renewals = 0
        """How often it was made anew since the start; whoever dials compares it with what it dialled with."""
        self._directory = directory
        self._listeners: list[Callable[[Identity], None]] = []

    def is_due(self, now: float) -> bool:
        """Return whether the certificate is to be made anew."""
        return is_due(self.current.not_before_s, self.current.not_after_s, now=now)

    def watch(self, listener: Callable[[Identity], None]) -> None:
        """Call ``listener`` with the identity, now and each time it was made anew."""
        self._listeners.append(listener)
        listener(self.current)

    def renew(self, certificate_pem: bytes) -> None:
        """Take a certificate made anew, and keep it on disk.

        Raises:
            RefusedError: MALFORMED; it is not one of the run's for this peer and key, or ends no later.
            OSError: it could not be written; the one of before still holds.
        """
        before = self.current
        try:
            renewed = make_identity(before.key_pem, certificate_pem, before.ca_pem)
        except ValueError as error:
            raise RefusedError(Reason.MALFORMED, f"the new certificate is unusable: {error}") from error
        if renewed.peer != before.peer or not is_issued_by(certificate_pem, before.ca_pem):
            raise RefusedError(Reason.MALFORMED, "the new certificate is not this peer's")
        if renewed.not_after_s <= before.not_after_s:
            raise RefusedError(Reason.MALFORMED, "the new certificate ends no later than the one of now")
        write_public(self._directory / CERTIFICATE_FILE, certificate_pem)
        self.current = renewed
        self.renewals += 1
        for listener in self._listeners:
            listener(renewed)


class RenewedCertificates:
    """At a hub: until when a key is good whose certificate was made anew, for connections made before."""

    def __init__(self) -> None:
        self._not_after_s: dict[bytes, float] = {}

    def note(self, certificate_pem: bytes, *, now: float) -> None:
        """Note a certificate of the run's authority; those that have expired since are forgotten."""
        certificate = read_certificate(certificate_pem)
        self._not_after_s = {key: end_s for key, end_s in self._not_after_s.items() if end_s > now}
        self._not_after_s[_key(certificate_pem)] = certificate.not_valid_after_utc.timestamp()

    def not_after_s(self, certificate_pem: bytes) -> float:
        """Return the end of the newest certificate that is known for another one's key, Unix seconds."""
        return self._not_after_s.get(_key(certificate_pem), 0.0) if self._not_after_s else 0.0


def is_due(not_before_s: float, not_after_s: float, *, now: float) -> bool:
    """Return whether a certificate of these dates, Unix seconds, is to be made anew."""
    lifetime_s = not_after_s - (not_before_s + CLOCK_SKEW_S)
    return not_after_s - now <= LAST_PART * lifetime_s


def _key(certificate_pem: bytes) -> bytes:
    key = read_certificate(certificate_pem).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
