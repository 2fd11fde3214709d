"""What a hub checks of a submission before it reads or stores any of it: size, whose it is, the proof."""

import logging

from heterorl.v1 import rollout_pb2
from node.errors import Reason, RefusedError
from node.identity.group_proof import GroupProof, GroupVerifier
from node.identity.peer import Peer, is_name
from node.run import Role

logger = logging.getLogger(__name__)


class SubmissionDoor:
    """Admits submissions at a hub."""

    def __init__(self, verifier: GroupVerifier | None) -> None:
        """Check with ``verifier``; None where TLS is off: nobody has a key, and everybody is this machine."""
        self._verifier = verifier

    def admit(
        self, request: rollout_pb2.SubmitRolloutsRequest, caller: Peer, *, group_bytes: int, now: float
    ) -> str:
        """Return the node id of the sampler that a submission counts for.

        Args:
            group_bytes: Of the largest group of the run.
            now: Unix seconds.

        Raises:
            RefusedError: OVER_LIMIT; WRONG_ROLE or MALFORMED, as ``submitter``; BAD_SIGNATURE.
        """
        if len(request.group) > group_bytes:
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"a group of {len(request.group)} bytes, the largest of this run has {group_bytes}",
            )
        sampler_id = submitter(caller, request.sampler_id)
        if self._verifier is None:
            return sampler_id
        proof = GroupProof(request.certificate, request.signature)
        try:
            self._verifier.check(
                proof, sampler_id=sampler_id, group_id=request.group_id, data=request.group, now=now
            )
        except RefusedError as refused:
            logger.warning(
                "group not proved",
                extra={
                    "from_role": caller.role,
                    "from_node": caller.node_id,
                    "sampler": sampler_id,
                    "group_id": request.group_id[:100],
                    "detail": str(refused),
                },
            )
            raise
        return sampler_id


def submitter(caller: Peer, named: str) -> str:
    """Return the node id of the sampler a submission is said to be from; the proof says whether it is.

    Args:
        caller: From its certificate.
        named: ``SubmitRolloutsRequest.sampler_id``.
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
