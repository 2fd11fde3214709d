"""Keys and certificates as PEM, and the peer that a certificate names. Bad input is a ValueError."""

from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from node.identity.peer import Peer

CLOCK_SKEW_S: Final = 86400.0
"""Certificates are valid from this long before they are made. Clocks are off by minutes, or by a time zone
(up to 14 h) where local time was set as UTC; a key that did not exist then is no danger."""


def new_key() -> ec.EllipticCurvePrivateKey:
    """Make a key on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: PrivateKeyTypes) -> bytes:
    """Return a private key as unencrypted PKCS#8."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_private_key(pem: bytes) -> PrivateKeyTypes:
    """Return the private key in ``pem``. Raises ValueError: there is none that we can read."""
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except (TypeError, UnsupportedAlgorithm) as error:  # the first: it is encrypted
        raise ValueError(str(error)) from error


def read_curve_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the key in ``pem``, as ``new_key`` makes them. Raises ValueError: there is none of this kind."""
    key = read_private_key(pem)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not on an elliptic curve")
    return key


def read_certificate(pem: bytes) -> x509.Certificate:
    """Return the certificate in ``pem``. Raises ValueError: there is none that we can read."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.public_key()  # Parsed only when asked for: it must fail here, not later.
    except (x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    return certificate


def is_same_certificate(first_pem: bytes, second_pem: bytes) -> bool:
    """Return whether two PEM texts hold one certificate."""
    return read_certificate(first_pem) == read_certificate(second_pem)


def is_issued_by(certificate_pem: bytes, ca_pem: bytes) -> bool:
    """Return whether an authority issued a certificate; dates are not looked at."""
    try:
        read_certificate(certificate_pem).verify_directly_issued_by(read_certificate(ca_pem))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def peer_in(certificate: x509.Certificate) -> Peer:
    """Return the peer that a certificate names; who signed it is not looked at.

    Raises RefusedError: UNAUTHENTICATED; it does not name exactly one.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        uris = []
    return Peer.from_spiffe_id(uris[0] if len(uris) == 1 else "")
