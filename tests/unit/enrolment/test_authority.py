import datetime
import ipaddress
from pathlib import Path

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from node.enrolment.authority import Authority, read_signing_request, signing_request
from node.errors import Reason
from node.identity.certificates import CLOCK_SKEW_S, new_key, read_certificate
from node.identity.peer import Peer, server_name
from node.values.limits import SIGNING_REQUEST_BYTES
from node.values.roles import Role
from support.identity import NOW_S
from support.refusals import cannot_start, naming, refused


@pytest.fixture
def authority() -> Authority:
    return Authority.create("run", now=NOW_S)


def issue(authority: Authority, role: Role, **arguments: object) -> x509.Certificate:
    peer = Peer("run", role, "node")
    pem = authority.issue(peer, new_key().public_key(), now=NOW_S, **arguments)  # type: ignore[arg-type]
    return x509.load_pem_x509_certificate(pem)


def names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


@pytest.mark.parametrize("role", list(Role))
def test_a_certificate_names_exactly_its_peer_and_only_hubs_have_a_hubs_name(
    authority: Authority, role: Role
) -> None:
    certificate = issue(authority, role, hosts=("hub.example.org", "192.0.2.7"))
    is_hub = role in (Role.COORDINATOR, Role.RELAY, Role.LEARNER)
    assert names(certificate).get_values_for_type(x509.UniformResourceIdentifier) == [
        f"spiffe://run/{role}/node"
    ]
    assert names(certificate).get_values_for_type(x509.DNSName) == (
        [server_name("run", role), "hub.example.org"] if is_hub else []
    )
    assert names(certificate).get_values_for_type(x509.IPAddress) == (
        [ipaddress.ip_address("192.0.2.7")] if is_hub else []
    )
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert ExtendedKeyUsageOID.CLIENT_AUTH in usages
    assert (ExtendedKeyUsageOID.SERVER_AUTH in usages) is is_hub


def test_a_certificate_is_the_authoritys_on_p256_and_cannot_issue_others(authority: Authority) -> None:
    certificate = issue(authority, Role.SAMPLER)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate_pem))
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_a_certificate_is_valid_from_before_it_was_made_for_as_long_as_asked(authority: Authority) -> None:
    certificate = issue(authority, Role.SAMPLER, lifetime_s=3600.0)
    made_at = datetime.datetime.fromtimestamp(NOW_S, datetime.UTC)
    assert certificate.not_valid_before_utc == made_at - datetime.timedelta(seconds=CLOCK_SKEW_S)
    assert certificate.not_valid_after_utc == made_at + datetime.timedelta(hours=1)


def test_an_authority_names_peers_of_its_own_run_only(authority: Authority) -> None:
    with naming(ValueError, "other"):
        authority.issue(Peer("other", Role.SAMPLER, "node"), new_key().public_key(), now=NOW_S)


def test_an_authority_is_read_back_whole_from_files_only_its_owner_reads(
    authority: Authority, tmp_path: Path
) -> None:
    authority.save(tmp_path / "authority")
    read = Authority.load(tmp_path / "authority")
    assert (read.run_id, read.certificate_pem) == ("run", authority.certificate_pem)
    assert read_signed(read.sign_token(b"message", typ="t"), authority) == b"message"
    assert (tmp_path / "authority").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "authority" / "ca.key").stat().st_mode & 0o777 == 0o600


def test_a_key_that_others_may_read_is_not_used(authority: Authority, tmp_path: Path) -> None:
    authority.save(tmp_path)
    (tmp_path / "ca.key").chmod(0o640)
    with cannot_start("640", "chmod 600"):
        Authority.load(tmp_path)


def test_a_damaged_or_mixed_authority_is_not_used(authority: Authority, tmp_path: Path) -> None:
    authority.save(tmp_path)
    good = (tmp_path / "ca.pem").read_bytes()
    (tmp_path / "ca.pem").write_bytes(good[:200])
    with cannot_start(str(tmp_path)):
        Authority.load(tmp_path)
    (tmp_path / "ca.pem").write_bytes(Authority.create("run", now=NOW_S).certificate_pem)
    with cannot_start("ca.key", "ca.pem"):
        Authority.load(tmp_path)
    (tmp_path / "ca.pem").unlink()
    with cannot_start("ca.pem"):
        Authority.load(tmp_path)


def read_signed(text: str, authority: Authority) -> bytes:
    key = read_certificate(authority.certificate_pem).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    payload: bytes = jwt.PyJWS().decode(text, key, algorithms=["ES256"])
    return payload


def test_a_signature_is_for_one_message_by_one_authority(authority: Authority) -> None:
    signed = authority.sign_token(b"message", typ="t")
    assert read_signed(signed, authority) == b"message"
    header, _, signature = signed.split(".")
    with pytest.raises(jwt.InvalidSignatureError):
        read_signed(".".join((header, "bWFzc2FnZQ", signature)), authority)
    with pytest.raises(jwt.InvalidSignatureError):
        read_signed(f"{header}.bWVzc2FnZQ.", authority)
    with pytest.raises(jwt.InvalidSignatureError):
        read_signed(signed, Authority.create("run", now=NOW_S))


def test_a_signing_request_gives_its_key() -> None:
    key = new_key()
    assert read_signing_request(signing_request(key)) == key.public_key()


def csr(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    algorithm = hashes.SHA256() if isinstance(key, ec.EllipticCurvePrivateKey) else None
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, algorithm)
    return request.public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    "der",
    [
        b"",
        b"nonsense",
        csr(ec.generate_private_key(ec.SECP384R1())),
        csr(ed25519.Ed25519PrivateKey.generate()),
        signing_request(new_key())[:-1],
        # The last bytes are the signature's.
        signing_request(new_key())[:-4] + b"\x01\x02\x03\x04",
    ],
    ids=["empty", "nonsense", "P-384", "Ed25519", "cut", "forged"],
)
def test_a_signing_request_of_another_kind_is_malformed(der: bytes) -> None:
    with refused(Reason.MALFORMED):
        read_signing_request(der)


def test_a_huge_signing_request_is_not_parsed() -> None:
    with refused(Reason.OVER_LIMIT):
        read_signing_request(bytes(SIGNING_REQUEST_BYTES + 1))
