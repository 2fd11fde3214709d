"""Enrolment: a token and a key go in, a certificate comes out.

The key never leaves the peer. Every step may be repeated: the key is kept on disk before the token is
shown, and the coordinator gives the holder of the same key its certificate again.
"""

import asyncio
import hashlib
import logging
import random
from pathlib import Path
from typing import Any, Final

import grpc.aio
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from heterorl.v1 import membership_pb2, membership_pb2_grpc
from node.clock import Clock
from node.enrolment.authority import Authority, read_signing_request, signing_request
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.enrolment.token_file import check_fits, how_to_get_a_token
from node.enrolment.tokens import Token, redeem
from node.errors import Reason, RefusedError, StartupError
from node.identity.certificates import key_to_pem
from node.identity.clock_skew import moment
from node.identity.identity_checks import check_own
from node.identity.identity_store import Identity, load_or_make_key, make_identity, save_identity
from node.identity.peer import Peer, is_name
from node.identity.revocation import RevocationList
from node.identity.run_description import RunDescription
from node.rpc.address import ENROLMENT_PORT
from node.rpc.channel import Backoff, ConnectionLost, call, dial_as_stranger
from node.run import Role

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 15.0
"""Deadline of one try: a handshake, a call and one fsync, on the worst link."""

PATIENCE_S: Final = 60.0
"""How long to go on trying: machines of a run start in any order."""


class EnrolmentServicer(membership_pb2_grpc.EnrolmentServiceServicer):
    """The coordinator's half. Runs on a port of its own, for callers without a certificate."""

    def __init__(
        self, *, authority: Authority, ledger: EnrolmentLedger, revocations: RevocationList, clock: Clock
    ) -> None:
        self._authority = authority
        self._ledger = ledger
        self._revocations = revocations
        self._clock = clock
        self._turn = asyncio.Lock()

    async def Enrol(  # noqa: N802 - the name in the .proto
        self,
        request: membership_pb2.EnrolRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> membership_pb2.EnrolResponse:
        """Give a certificate for a token."""
        node_id = request.node_id
        if not is_name(node_id):
            raise RefusedError(
                Reason.MALFORMED, f"{node_id[:100]!r} is no node id", fix="use 1-63 of [a-z0-9-]"
            )
        if self._revocations.is_revoked(node_id):
            raise RefusedError(
                Reason.TOKEN_REFUSED, f"{node_id} was revoked", fix="ask the operator of the run"
            )
        now = self._clock.now()
        key = read_signing_request(request.signing_request_der)
        token = redeem(request.token, authority=self._authority, node_id=node_id, now=now)
        der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        async with self._turn:
            await asyncio.to_thread(
                self._ledger.spend, token, node_id=node_id, key_digest=hashlib.sha256(der).digest(), now=now
            )
        certificate_pem = self._authority.issue(Peer(token.run_id, token.role, node_id), key, now=now)
        logger.info("peer enrolled", extra={"node_id": node_id, "role": token.role, "peer": context.peer()})
        return membership_pb2.EnrolResponse(certificate_pem=certificate_pem.decode())


async def enrol(
    token_text: str,
    *,
    run: RunDescription,
    role: Role,
    node_id: str,
    directory: Path,
    now: float,
    patience_s: float = PATIENCE_S,
) -> Identity:
    """Get this peer's certificate and keep it in ``directory``.

    Args:
        token_text: what `heterorl-node token` printed.
        run: the run to join; the token must be of the same authority.
        role: what the peer is started as; the token must be for it.
        node_id: wanted name.
        directory: of the identity; may hold the key of an earlier try.
        now: Unix seconds.
        patience_s: how long to try while the coordinator does not answer.
    Raises:
        StartupError: the token does not fit, was refused, or the coordinator cannot be reached.
    """
    new_token = f"{how_to_get_a_token(role)}."
    try:
        token = Token.parse(token_text)
    except RefusedError as refusal:
        raise StartupError(f"node.token_file: {refusal}", fix=new_token) from refusal
    check_fits(token, run=run, role=role)
    key = load_or_make_key(directory)
    request = membership_pb2.EnrolRequest(
        token=token_text.strip(), signing_request_der=signing_request(key), node_id=node_id
    )
    channel = dial_as_stranger(token.address, run_id=run.run_id, ca_pem=run.ca_certificate_pem)
    async with channel:
        try:
            response = await _exchange(channel, request, patience_s)
        except RefusedError as refusal:
            raise _refused(refusal, token, now=now, new_token=new_token) from refusal
        except ConnectionLost as lost:
            raise StartupError(
                f"The enrolment port {token.address} cannot be reached: {lost}",
                fix="Check that the coordinator runs and that this is its enrolment port "
                f"(coordinator.enrolment_listen, {ENROLMENT_PORT} unless configured), then start again: "
                "the token is not lost.",
            ) from lost
    try:
        identity = make_identity(key_to_pem(key), response.certificate_pem.encode(), run.ca_certificate_pem)
    except (ValueError, RefusedError) as error:
        raise StartupError(
            f"The coordinator's certificate for this node is unusable: {error}", fix=new_token
        ) from error
    check_own(identity, run, role, now)
    save_identity(identity, directory)
    return identity


def _refused(refusal: RefusedError, token: Token, *, now: float, new_token: str) -> StartupError:
    hub_now_s = refusal.hub_now_s
    if hub_now_s is None or not now < token.expires_at_s <= hub_now_s:
        return StartupError(f"The coordinator refused the token: {refusal}", fix=new_token)
    return StartupError(
        f"The coordinator refused the token: {refusal.what}. The token is good until "
        f"{moment(token.expires_at_s)}: the coordinator's clock says {moment(hub_now_s)}, this machine's "
        f"{moment(now)}",
        fix=f"If a clock is wrong, set it and start again: the token is not spent. If not: {new_token}",
    )


async def _exchange(
    channel: grpc.aio.Channel, request: membership_pb2.EnrolRequest, patience_s: float
) -> membership_pb2.EnrolResponse:
    stub = membership_pb2_grpc.EnrolmentServiceStub(channel)
    backoff = Backoff(random.random, cap_s=5.0)
    clock = asyncio.get_running_loop().time
    give_up_at_s = clock() + patience_s
    while True:
        try:
            return await call(stub.Enrol, request, timeout_s=CALL_TIMEOUT_S)
        except ConnectionLost as lost:
            if clock() >= give_up_at_s:
                raise
            logger.warning("enrolment port not reached, trying again", extra={"detail": str(lost)})
        await backoff.wait()
