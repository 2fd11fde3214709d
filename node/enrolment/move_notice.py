"""Where the coordinator will be: a notice signed by the run's authority, which peers keep.

    heterorl-node move --to HOST:PORT --order--> coordinator --answers--> peers: <state>/moved

A peer goes on where it is until that fails, and then looks at the new address first. Nobody but the authority
sends it anywhere, and wherever it goes, it talks to hubs of its run alone.
"""

import json
import logging
from pathlib import Path
from typing import Final, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.enrolment.authority import TOKEN_ALGORITHM, Authority
from node.errors import Reason, RefusedError
from node.identity.certificates import read_certificate
from node.identity.files import write_public
from node.identity.run_description import RunDescription
from node.rpc.address import split_target
from node.rpc.hub import Hub

logger = logging.getLogger(__name__)

FILE_NAME: Final = "moved"
TYPE: Final = "heterorl-move+jwt"
NOTICE_BYTES: Final = 4096
MOST_ADDRESSES: Final = 8

_JWS: Final = jwt.PyJWS(algorithms=[TOKEN_ALGORITHM])


class MoveNotice(BaseModel):
    """The claims of a notice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    iss: str
    """Id of the run."""
    iat: float = Field(allow_inf_nan=False)
    """When it was made, Unix seconds: a newer one replaces an older one."""
    addresses: tuple[str, ...] = Field(min_length=1, max_length=MOST_ADDRESSES)
    """host:port of the members service, at one or several coordinators."""

    @classmethod
    def read(cls, text: bytes, *, run: RunDescription) -> Self:
        """Read a notice of the run's authority.

        Raises RefusedError: BAD_SIGNATURE; it is none. OVER_LIMIT; it is too long.
        """
        if len(text) > NOTICE_BYTES:
            raise RefusedError(Reason.OVER_LIMIT, f"a notice of {len(text)} bytes, {NOTICE_BYTES} are read")
        not_signed = RefusedError(Reason.BAD_SIGNATURE, "not a notice of the run's authority")
        key = read_certificate(run.ca_certificate_pem).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise not_signed
        try:
            decoded = _JWS.decode_complete(text.decode("ascii"), key, algorithms=[TOKEN_ALGORITHM])
            if decoded["header"].get("typ") != TYPE:
                raise not_signed
            notice = cls.model_validate(json.loads(decoded["payload"]))
            for address in notice.addresses:
                split_target(address)
        except (jwt.PyJWTError, ValidationError, ValueError) as error:
            raise not_signed from error
        if notice.iss != run.run_id:
            raise not_signed
        return notice


def sign_move(authority: Authority, addresses: tuple[str, ...], *, now: float) -> bytes:
    """Return a notice. Raises ValueError: an address cannot be dialled, or there are too many."""
    for address in addresses:
        split_target(address)
    notice = MoveNotice(iss=authority.run_id, iat=now, addresses=addresses)
    return authority.sign_token(notice.model_dump_json().encode(), typ=TYPE).encode()


class MovedCoordinator:
    """At a peer: adds the coordinator's new addresses to its hubs', now and after restarts."""

    def __init__(self, hub: Hub, run: RunDescription, state_dir: Path) -> None:
        """Use the notice that was kept before, if there is one."""
        self.hub = hub
        self._hubs = [hub]
        self._addresses: tuple[str, ...] = ()
        self._run = run
        self._path = state_dir / FILE_NAME
        self._made_at_s = float("-inf")
        if kept := _kept(self._path):
            self._take(kept)

    def follow(self, hub: Hub) -> Hub:
        """Tell another hub, too, where the coordinator is, now and from now on; return it."""
        self._hubs.append(hub)
        if self._addresses:
            hub.learn(self._addresses)
        return hub

    def learn(self, text: bytes) -> None:
        """Take a notice, and keep it on disk; one that is not newer, or not signed, changes nothing."""
        if not self._take(text):
            return
        try:
            write_public(self._path, text)
        except OSError as error:
            logger.error("notice not kept", extra={"path": str(self._path), "detail": error.strerror})

    def _take(self, text: bytes) -> bool:
        try:
            notice = MoveNotice.read(text, run=self._run)
        except RefusedError as refused:
            logger.warning("notice of a move refused", extra={"detail": str(refused)})
            return False
        if notice.iat <= self._made_at_s:
            return False
        self._made_at_s = notice.iat
        self._addresses = notice.addresses
        for hub in self._hubs:
            hub.learn(notice.addresses)
        logger.info("the coordinator moves", extra={"to": ", ".join(notice.addresses)})
        return True


def _kept(path: Path) -> bytes:
    """Return the notice that was kept; empty: there is none."""
    try:
        with path.open("rb") as file:
            return file.read(NOTICE_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        logger.warning("move notice not read", extra={"path": str(path), "error": str(error)})
        return b""
