"""The run's certificate authority: it turns a key and a name into a certificate.

ECDSA P-256 throughout: TLS stacks refuse Ed25519 leaves. The coordinator holds the authority's key,
so a stolen coordinator can admit peers; it still cannot sign a policy version (``signatures``).
"""

import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

import jwt
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from node.errors import Reason, RefusedError, StartupError
from node.identity.certificates import CLOCK_SKEW_S, key_to_pem, new_key, read_certificate, read_curve_key
from node.identity.files import cannot_read, make_private_directory, read_secret, write_public, write_secret
from node.identity.peer import SERVING_ROLES, Peer, server_name
from node.values.limits import SIGNING_REQUEST_BYTES

KEY_FILE: Final = "ca.key"
CERTIFICATE_FILE: Final = "ca.pem"

AUTHORITY_LIFETIME_S: Final = 10 * 365 * 86400.0
LEAF_LIFETIME_S: Final = 365 * 86400.0
"""As `coordinator.certificate_lifetime_s` is by default."""

TOKEN_ALGORITHM: Final = "ES256"
"""ECDSA on P-256 with SHA-256, like the certificates."""


class Authority:
    """A key that vouches for the peers of one run."""

    def __init__(self, run_id: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.run_id = run_id
        self.certificate_pem = certificate.public_bytes(serialization.Encoding.PEM)
        self._key = key
        self._certificate = certificate

    @classmethod
    def create(cls, run_id: str, *, now: float) -> Self:
        """Make a new authority for a run."""
        key = new_key()
        name = _name(run_id)
        certificate = (
            _builder(name, name, key.public_key(), now=now, lifetime_s=AUTHORITY_LIFETIME_S)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(run_id, key, certificate)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read an authority. Raises StartupError: there is none in ``directory``, or it is damaged."""
        key_pem = read_secret(directory / KEY_FILE)
        try:
            key = read_curve_key(key_pem)
            certificate = read_certificate((directory / CERTIFICATE_FILE).read_bytes())
            run_id = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        except OSError as error:
            fix = "Restore the directory from a copy."
            raise cannot_read(directory / CERTIFICATE_FILE, error, fix=fix) from error
        except (ValueError, IndexError) as error:
            raise StartupError(
                f"The certificate authority in {directory} is damaged: {error}",
                fix="Restore the directory from a copy.",
            ) from error
        if key.public_key() != certificate.public_key():
            raise StartupError(
                f"{KEY_FILE} and {CERTIFICATE_FILE} in {directory} do not belong together",
                fix="Restore the directory from a copy.",
            )
        return cls(str(run_id), key, certificate)

    def save(self, directory: Path) -> None:
        """Write the authority, key included, into a directory of its own."""
        make_private_directory(directory)
        write_public(directory / CERTIFICATE_FILE, self.certificate_pem)
        write_secret(directory / KEY_FILE, key_to_pem(self._key))

    def issue(
        self,
        peer: Peer,
        public_key: ec.EllipticCurvePublicKey,
        *,
        now: float,
        lifetime_s: float = LEAF_LIFETIME_S,
        hosts: Iterable[str] = (),
    ) -> bytes:
        """Return the PEM certificate that says ``public_key`` is ``peer``, of this authority's run.

        Args:
            lifetime_s: from ``now``.
            hosts: names and addresses a hub is reached at, for tools that check them.
        """
        if peer.run_id != self.run_id:
            raise ValueError(f"the authority of {self.run_id} cannot name a peer of {peer.run_id}")
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(peer.spiffe_id)]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if peer.role in SERVING_ROLES:
            names += [x509.DNSName(server_name(peer.run_id, peer.role)), *map(_host_name, hosts)]
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        certificate = (
            _builder(
                _name(peer.node_id), self._certificate.subject, public_key, now=now, lifetime_s=lifetime_s
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def sign_token(self, payload: bytes, *, typ: str) -> str:
        """Return ``payload`` as a compact JSON Web Signature with header ``typ``; ``tokens`` reads it."""
        return jwt.PyJWS().encode(payload, self._key, TOKEN_ALGORITHM, headers={"typ": typ})


def present_authority(directory: Path) -> Authority | None:
    """Read an authority whose key may be kept elsewhere; None while it is not in ``directory``.

    Raises StartupError: as ``Authority.load``.
    """
    return Authority.load(directory) if (directory / KEY_FILE).exists() else None


def signing_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the PKCS#10 request (DER) that proves possession of ``key``; it names nobody."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def read_signing_request(der: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a signing request whose self-signature is right.

    Raises RefusedError: OVER_LIMIT or MALFORMED.
    """
    if len(der) > SIGNING_REQUEST_BYTES:
        raise RefusedError(
            Reason.OVER_LIMIT,
            f"signing request of {len(der)} bytes, at most {SIGNING_REQUEST_BYTES} are read",
        )
    try:
        request = x509.load_der_x509_csr(der)
        key = request.public_key()
        # Whole octets: with a last bit of 0 said to be unused it would be the same request written otherwise.
        is_valid = request.is_signature_valid and der.endswith(b"\0" + request.signature)
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise RefusedError(Reason.MALFORMED, "the signing request does not parse") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RefusedError(Reason.MALFORMED, "the key of the signing request is not on P-256")
    if not is_valid:
        raise RefusedError(Reason.MALFORMED, "the signing request is not signed by its own key")
    return key


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, now: float, lifetime_s: float
) -> x509.CertificateBuilder:
    made_at = datetime.datetime.fromtimestamp(now, datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(made_at - datetime.timedelta(seconds=CLOCK_SKEW_S))
        .not_valid_after(made_at + datetime.timedelta(seconds=lifetime_s))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
