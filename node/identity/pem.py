"""Keys and certificates as PEM. Reading fails in one way: ValueError."""

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes


def read_certificate(pem: bytes) -> x509.Certificate:
    """Give the certificate in ``pem``.

    Raises:
        ValueError: there is none, or it is of a kind we do not read.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        # Parsed when asked for, and then it may fail: better here.
        certificate.public_key()
    except (x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    return certificate


def read_signing_request_der(der: bytes) -> x509.CertificateSigningRequest:
    """Give the PKCS#10 request in ``der``; its signature is not checked.

    Raises:
        ValueError: there is none, or it is of a kind we do not read.
    """
    try:
        request = x509.load_der_x509_csr(der)
        request.public_key()
    except (x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    return request


def read_private_key(pem: bytes) -> PrivateKeyTypes:
    """Give the private key in ``pem``.

    Raises:
        ValueError: there is none, it is encrypted, or it is of a kind we do not read.
    """
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error


def new_key() -> ec.EllipticCurvePrivateKey:
    """Make a key on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Give a private key as unencrypted PKCS#8."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
