"""A hub's checks of a submission before it reads or stores any of it: size, owner, proof."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from heterorl.v1 import rollout_pb2
from node.errors import Reason, RefusedError
from node.identity.group_proof import GroupProof, GroupVerifier
from node.identity.peer import Peer, is_name
from node.rollout import EncodedGroup
from node.run import Role

logger = logging.getLogger(__name__)


IN_FLIGHT_BYTES: Final = 256 << 20
"""Groups that may wait for the disk at once; senders keep the others. A slow disk takes two seconds."""


class Submission(NamedTuple):
    """A group whose sampler is proved."""

    sampler_id: str
    group_id: str
    group: EncodedGroup


class SubmissionDoor:
    """Admits submissions at a hub."""

    def __init__(self, verifier: GroupVerifier | None) -> None:
        """Check with ``verifier``; None where TLS is off: nobody has a key, and everybody is this machine."""
        self._verifier = verifier
        self._in_flight_bytes = 0

    @contextmanager
    def admitted(
        self, request: rollout_pb2.SubmitRolloutsRequest, caller: Peer, *, group_bytes: int, now: float
    ) -> Iterator[Submission]:
        """Yield a submission with the sampler that it counts for; it is in flight during the body.

        Raises:
            RefusedError: OVER_LIMIT; WRONG_ROLE or MALFORMED, as ``submitter``; BAD_SIGNATURE; BUSY, where
                too much is in flight.
        """
        # Each look at a field of a message copies it.
        group = EncodedGroup(request.header, request.columns)
        size_bytes = group.size_bytes
        if size_bytes > group_bytes:
            raise RefusedError(
                Reason.OVER_LIMIT, f"a group of {size_bytes} bytes, the largest of this run has {group_bytes}"
            )
        submission = Submission(submitter(caller, request.sampler_id), request.group_id, group)
        if self._in_flight_bytes + size_bytes > max(IN_FLIGHT_BYTES, group_bytes):
            raise RefusedError(
                Reason.BUSY,
                f"{self._in_flight_bytes} bytes of groups wait for the disk",
                fix="send it again later",
            )
        if self._verifier is not None:
            proof = GroupProof(request.certificate, request.signature)
            _check_proof(self._verifier, proof, submission, caller, now=now)
        self._in_flight_bytes += size_bytes
        try:
            yield submission
        finally:
            self._in_flight_bytes -= size_bytes


def submitter(caller: Peer, named: str) -> str:
    """Return the node id of the sampler a submission is said to be from; the proof says whether it is.

    Raises:
        RefusedError: WRONG_ROLE, if anyone but a relay names somebody; MALFORMED, if a relay names nobody.
    """
    if caller.role is not Role.RELAY:
        if named:
            raise RefusedError(
                Reason.WRONG_ROLE,
                f"{caller.node_id} is a {caller.role} and submits for itself, not for {named[:100]!r}",
            )
        return caller.node_id
    if not is_name(named):
        raise RefusedError(Reason.MALFORMED, f"{named[:100]!r} is not the node id of a sampler to submit for")
    return named


def _check_proof(
    verifier: GroupVerifier, proof: GroupProof, submission: Submission, caller: Peer, *, now: float
) -> None:
    sampler_id, group_id, group = submission
    try:
        verifier.check(proof, sampler_id=sampler_id, group_id=group_id, group=group, now=now)
    except RefusedError as refused:
        logger.warning(
            "group not proved",
            extra={
                "from_role": caller.role,
                "from_node": caller.node_id,
                "sampler": sampler_id,
                "group_id": group_id[:100],
                "detail": str(refused),
            },
        )
        raise
