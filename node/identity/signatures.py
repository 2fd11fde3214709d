"""The learner's signature, by which a policy version is known to be this run's, whoever carries it.

What is signed is the domain followed by the message. A domain ends with its only NUL: none is a prefix of
another, and a signature made for one purpose is worthless for every other.
"""

from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519

from node.errors import Reason, RefusedError, StartupError
from node.identity.certificates import key_to_pem, read_private_key
from node.identity.files import read_secret, write_secret


class SigningKey:
    """An Ed25519 key. It never leaves the learner's machine."""

    def __init__(self, key: ed25519.Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()
        """32 bytes, known to every peer by the run description."""

    @classmethod
    def generate(cls) -> Self:
        """Make a new key."""
        return cls(ed25519.Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a key. Raises StartupError: it is missing or damaged, or others may read it."""
        try:
            key = read_private_key(read_secret(path))
            if not isinstance(key, ed25519.Ed25519PrivateKey):
                raise ValueError("not an Ed25519 key")
        except ValueError as error:
            raise StartupError(f"{path} is damaged: {error}", fix="Restore it from a copy.") from error
        return cls(key)

    def save(self, path: Path) -> None:
        """Write the key, readable by its owner only."""
        write_secret(path, key_to_pem(self._key))

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """Return the 64 bytes that ``verify`` accepts for this domain and message only."""
        _check_domain(domain)
        return self._key.sign(domain + message)


def verify(public_key: bytes, domain: bytes, message: bytes, signature: bytes) -> None:
    """Check a signature. Raises RefusedError: BAD_SIGNATURE; another key, domain or message, or none."""
    _check_domain(domain)
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public_key).verify(signature, domain + message)
    except (InvalidSignature, ValueError) as error:
        raise RefusedError(
            Reason.BAD_SIGNATURE,
            f"not signed by the run's learner (key {public_key[:4].hex()}...) for {domain[:-1].decode()}",
        ) from error


def _check_domain(domain: bytes) -> None:
    if domain.find(b"\0") != len(domain) - 1 or len(domain) < 2:
        raise ValueError(f"a domain ends with its only NUL: {domain!r}")
