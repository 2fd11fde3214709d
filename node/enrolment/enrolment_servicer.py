"""The coordinator's half of enrolment: a token and a key go in, a certificate comes out.

Asking again with the same token and the same key succeeds, so a lost answer costs nothing.
"""

import asyncio
import hashlib
import logging
from pathlib import Path
from typing import Any

import grpc.aio
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from heterorl.v1 import membership_pb2, membership_pb2_grpc
from node.enrolment.authority import KEY_FILE, Authority, present_authority, read_signing_request
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.enrolment.tokens import redeem
from node.errors import Reason, RefusedError, StartupError
from node.identity.peer import Peer, is_name
from node.identity.revocation import RevocationList
from node.system.clock import Clock

logger = logging.getLogger(__name__)


class EnrolmentServicer(membership_pb2_grpc.EnrolmentServiceServicer):
    """Serves a port of its own, for callers without a certificate."""

    def __init__(
        self,
        *,
        authority: Path,
        lifetime_s: float,
        ledger: EnrolmentLedger,
        revocations: RevocationList,
        clock: Clock,
    ) -> None:
        """Issue certificates of ``lifetime_s`` with the authority in a directory, while its key is there."""
        self._authority = authority
        self._lifetime_s = lifetime_s
        self._ledger = ledger
        self._revocations = revocations
        self._clock = clock
        self._turn = asyncio.Lock()

    async def Enrol(  # noqa: N802 - the name in the .proto
        self,
        request: membership_pb2.EnrolRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> membership_pb2.EnrolResponse:
        """Return a certificate for a token."""
        node_id = request.node_id
        if not is_name(node_id):
            raise RefusedError(
                Reason.MALFORMED, f"{node_id[:100]!r} is not a valid node id", fix="use 1-63 of [a-z0-9-]"
            )
        now = self._clock.now()
        key = read_signing_request(request.signing_request_der)
        authority = self._present()
        token = redeem(request.token, authority=authority, node_id=node_id, now=now)
        if self._revocations.is_revoked(node_id):
            raise RefusedError(Reason.REVOKED, f"{node_id} was revoked", fix="ask the operator of the run")
        der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        async with self._turn:
            await asyncio.to_thread(
                self._ledger.spend, token, node_id=node_id, key_digest=hashlib.sha256(der).digest(), now=now
            )
        certificate_pem = authority.issue(
            Peer(token.run_id, token.role, node_id), key, now=now, lifetime_s=self._lifetime_s
        )
        logger.info("peer enrolled", extra={"node_id": node_id, "role": token.role, "peer": context.peer()})
        return membership_pb2.EnrolResponse(certificate_pem=certificate_pem.decode())

    def _present(self) -> Authority:
        """Return the authority. Raises RefusedError: TOKEN_REFUSED; its key is not here, or unreadable."""
        try:
            authority = present_authority(self._authority)
        except StartupError as error:
            logger.error("nobody is let in", extra={"detail": str(error)})
            authority = None
        if authority is None:
            raise RefusedError(
                Reason.TOKEN_REFUSED,
                "the authority's key is not at the coordinator now, so that nobody is let in",
                fix=f"ask the operator to bring {KEY_FILE} back; the token is not spent",
            )
        return authority
