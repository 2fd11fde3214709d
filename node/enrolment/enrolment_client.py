"""A peer's first start: a token and a key of its own become a certificate.

The key never leaves the peer. Every step may be repeated: the key is on disk before the token is shown, and
the coordinator gives the holder of the same key a certificate again.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc.aio

from heterorl.v1 import membership_pb2, membership_pb2_grpc
from node.enrolment.authority import signing_request
from node.enrolment.tokens import Token, how_to_get_a_token, usable_token
from node.errors import RefusedError, StartupError
from node.identity.certificates import key_to_pem
from node.identity.files import make_private_directory, write_public
from node.identity.identity_store import (
    Identity,
    check_own,
    identity_on_disk,
    load_or_make_key,
    make_identity,
    save_identity,
)
from node.identity.peer import is_name
from node.identity.run_description import RunDescription
from node.rpc.address import ENROLMENT_PORT
from node.rpc.call_ends import ConnectionLost, call
from node.rpc.channel import dial_as_stranger
from node.system.backoff import Backoff
from node.system.clock import moment
from node.values.roles import Role

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 15.0
"""Deadline of one try: a handshake, a call and one fsync, on the worst link."""

PATIENCE_S: Final = 60.0
"""How long to go on trying: machines of a run start in any order."""

NAME_FILE: Final = "node_id"


async def obtain_identity(
    directory: Path,
    *,
    run: RunDescription,
    role: Role,
    node_id: str | None,
    token_file: Path | None,
    now: float,
    warn: Callable[[str], None],
    patience_s: float = PATIENCE_S,
) -> Identity:
    """Return the identity in ``directory``; at the first start, fetch it with a token and keep it there.

    Args:
        node_id: the wanted name; None: what the token says, else a random one, kept.
        warn: called with a sentence if others may read the token.
        patience_s: how long to try while the coordinator does not answer.
    Raises:
        StartupError: identity or token would not be or was not accepted, there is neither, or nobody answers.
        ConfigError: ``node_id`` is not the name in the identity.
    """
    identity = identity_on_disk(directory, role=role, run=run, node_id=node_id, now=now)
    if identity is not None:
        return identity
    found = usable_token(token_file, directory, run=run, role=role)
    if found.exposure:
        warn(found.exposure)
    token = found.token
    key = load_or_make_key(directory)
    request = membership_pb2.EnrolRequest(
        token=found.text,
        signing_request_der=signing_request(key),
        node_id=node_id or token.node_id or kept_name(directory.parent, role=role),
    )
    async with dial_as_stranger(token.address, run_id=run.run_id, ca_pem=run.ca_certificate_pem) as channel:
        try:
            response = await _exchange(channel, request, patience_s)
        except RefusedError as refusal:
            raise _refused(refusal, token, now=now) from refusal
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
            f"The coordinator's certificate for this node is unusable: {error}",
            fix=f"{how_to_get_a_token(role)}.",
        ) from error
    check_own(identity, run, role, now)
    save_identity(identity, directory)
    return identity


def kept_name(state_dir: Path, *, role: Role) -> str:
    """Return the random name of this peer, which it takes at its first start and keeps."""
    path = state_dir / NAME_FILE
    try:
        name = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        name = f"{role}-{secrets.token_hex(4)}"
        make_private_directory(state_dir)
        write_public(path, name.encode() + b"\n")
    if not is_name(name):
        raise StartupError(
            f"{path} holds {name[:100]!r}, which is not a valid node id", fix="Delete the file."
        )
    return name


def _refused(refusal: RefusedError, token: Token, *, now: float) -> StartupError:
    what, fix = str(refusal), f"{how_to_get_a_token(token.role)}."
    hub_now_s = refusal.hub_now_s
    if hub_now_s is not None and now < token.expires_at_s <= hub_now_s:
        what = (
            f"{refusal.what}. The token is good until {moment(token.expires_at_s)}: the coordinator's clock "
            f"says {moment(hub_now_s)}, this machine's {moment(now)}"
        )
        fix = f"If a clock is wrong, set it and start again: the token is not spent. If not: {fix}"
    return StartupError(f"The coordinator refused the token: {what}", fix=fix)


async def _exchange(
    channel: grpc.aio.Channel, request: membership_pb2.EnrolRequest, patience_s: float
) -> membership_pb2.EnrolResponse:
    stub = membership_pb2_grpc.EnrolmentServiceStub(channel)
    backoff = Backoff(random.random, cap_s=5.0)
    clock = asyncio.get_running_loop().time
    give_up_at_s = clock() + patience_s
    said = ""
    while True:
        try:
            return await call(stub.Enrol, request, timeout_s=CALL_TIMEOUT_S)
        except ConnectionLost as lost:
            if clock() >= give_up_at_s:
                raise
            if str(lost) != said:
                said = str(lost)
                fields = {"detail": said, "patience_s": patience_s}
                logger.warning("enrolment port not reached, trying again", extra=fields)
        await backoff.wait()
