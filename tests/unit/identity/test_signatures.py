from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from node.errors import Reason
from node.identity.certificates import key_to_pem, new_key
from node.identity.files import write_secret
from node.identity.signatures import SigningKey, verify
from support.refusals import cannot_start, refused

DOMAIN = b"heterorl-manifest-v1\0"

# RFC 8032, section 7.1, test 3: the message is the domain and what is signed in it, together.
RFC_SECRET = bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7")
RFC_PUBLIC = bytes.fromhex("fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025")


def test_a_keys_public_half_is_that_of_the_standard(tmp_path: Path) -> None:
    pem = ed25519.Ed25519PrivateKey.from_private_bytes(RFC_SECRET).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_secret(tmp_path / "signing.key", pem)
    assert SigningKey.load(tmp_path / "signing.key").public_key == RFC_PUBLIC


def test_what_is_signed_is_the_domain_followed_by_the_message() -> None:
    key = SigningKey.generate()
    signature = key.sign(DOMAIN, b"message")
    public = ed25519.Ed25519PublicKey.from_public_bytes(key.public_key)
    public.verify(signature, b"heterorl-manifest-v1\0message")
    verify(key.public_key, DOMAIN, b"message", signature)


def test_a_signature_is_good_for_one_key_one_domain_and_one_message_only() -> None:
    key = SigningKey.generate()
    signature = key.sign(DOMAIN, b"message")
    attempts = [
        (SigningKey.generate().public_key, DOMAIN, b"message", signature),
        (key.public_key, b"heterorl-manifest-v2\0", b"message", signature),
        (key.public_key, DOMAIN, b"massage", signature),
        (key.public_key, DOMAIN, b"message", signature[:-1]),
        (key.public_key, DOMAIN, b"message", signature[:-1] + bytes([signature[-1] ^ 1])),
        (key.public_key, DOMAIN, b"message", b""),
        (key.public_key[:-1], DOMAIN, b"message", signature),
    ]
    for public_key, domain, message, forged in attempts:
        with refused(Reason.BAD_SIGNATURE):
            verify(public_key, domain, message, forged)


@pytest.mark.parametrize("domain", [b"", b"\0", b"no-end", b"two\0ends\0", b"after\0end"])
def test_a_domain_that_could_be_the_beginning_of_another_is_a_mistake(domain: bytes) -> None:
    key = SigningKey.generate()
    with pytest.raises(ValueError, match="a domain ends with its only NUL"):
        key.sign(domain, b"message")
    with pytest.raises(ValueError, match="a domain ends with its only NUL"):
        verify(key.public_key, domain, b"message", bytes(64))


def test_a_key_is_read_back_from_a_file_only_its_owner_reads(tmp_path: Path) -> None:
    key = SigningKey.generate()
    key.save(tmp_path / "signing.key")
    assert (tmp_path / "signing.key").stat().st_mode & 0o777 == 0o600
    verify(key.public_key, DOMAIN, b"m", SigningKey.load(tmp_path / "signing.key").sign(DOMAIN, b"m"))


def test_a_missing_open_damaged_or_wrong_key_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    with cannot_start("signing.key"):
        SigningKey.load(path)
    write_secret(path, b"nonsense")
    with cannot_start("signing.key", "PEM"):
        SigningKey.load(path)
    write_secret(path, key_to_pem(new_key()))
    with cannot_start("signing.key", "Ed25519"):
        SigningKey.load(path)
    SigningKey.generate().save(path)
    path.chmod(0o604)
    with cannot_start("604"):
        SigningKey.load(path)
