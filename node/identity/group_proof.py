"""Proof that a sampler itself made a group, whoever hands it in: its certificate, and a signature by its key.

A hub sees the TLS connection of the peer that calls it. Behind a relay that is the relay, so a group carries
its own proof, which works after a restart and through any number of hubs.
"""

from dataclasses import replace
from typing import Final

import blake3

from node.identity.certificates import read_curve_key
from node.identity.identity_store import Identity
from node.identity.own_identity import OwnIdentity
from node.identity.sampler_signatures import ALGORITHM, SamplerSignatures
from node.rollout import EncodedGroup

_DOMAIN: Final = b"heterorl.v1.RolloutGroup\0"


class GroupSigner:
    """Signs groups as one sampler."""

    def __init__(self, identity: Identity | OwnIdentity) -> None:
        self._identity = identity
        self._key = read_curve_key(identity.current.key_pem)

    def signed(self, group: EncodedGroup) -> EncodedGroup:
        """Return a group with its proof."""
        identity = self._identity.current
        signature = self._key.sign(_signed_message(identity.run_id, group), ALGORITHM)
        return replace(group, certificate=identity.certificate_pem, signature=signature)


class GroupVerifier:
    """Checks the proofs of one run's groups."""

    def __init__(self, ca_pem: bytes, *, run_id: str) -> None:
        self._run_id = run_id
        self._signatures = SamplerSignatures(ca_pem, run_id=run_id)

    def check(self, group: EncodedGroup, *, now: float) -> None:
        """Check that the sampler it names made the group. Raises RefusedError: BAD_SIGNATURE; it did not."""
        self._signatures.check(
            f"group {group.group_id[:100]!r}",
            group.sampler_id,
            certificate=group.certificate,
            signature=group.signature,
            message=_signed_message(self._run_id, group),
            now=now,
        )


def _signed_message(run_id: str, group: EncodedGroup) -> bytes:
    # Neither id has a NUL in it once it is accepted, and digests have a fixed length.
    digests = b"".join(blake3.blake3(part).digest() for part in group.parts)
    return b"\0".join((_DOMAIN[:-1], run_id.encode(), group.group_id.encode(), digests))
