"""Single-use tokens: how an operator lets one new peer in.

A token is a JSON Web Token (ES256) signed by the run's authority. It carries the authority's certificate, so
that its holder can tell the coordinator from a stranger; it is a secret until it is spent or has expired.
Whether it was spent before is not decided here: ``enrolment_ledger`` remembers.

A token in a file is written for its owner only, and refused if others may have replaced it:

    0600, 0400    the owner                                                      taken
    0440          root's, opened to this process's group: a mounted secret       taken
    0640, 0644    others may read it: ``> file`` under umask 022, or a Secret    taken, with a warning
    0620, 0666    others may write it                                            refused

Kubernetes mounts Secrets that others may read by default. Nothing mounts a secret that others may write, and
a token that anyone may replace says nothing about who is let in.
"""

import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.enrolment.authority import TOKEN_ALGORITHM, Authority
from node.errors import Reason, RefusedError, StartupError
from node.identity.certificates import is_same_certificate, read_certificate
from node.identity.files import cannot_make, cannot_read, read_with_status, write_secret
from node.identity.run_description import RunDescription
from node.rpc.address import split_target
from node.system.clock import moment
from node.values.limits import NAME_PATTERN, TOKEN_BYTES
from node.values.roles import MEMBER_ROLES, Role

TYPE: Final = "heterorl-token+jwt"
"""Header ``typ``: nothing else that the authority might sign passes for a token (RFC 8725, 3.11)."""

_JWS: Final = jwt.PyJWS(algorithms=[TOKEN_ALGORITHM])

DEFAULT_LIFETIME_S: Final = 2 * 86400.0
"""A machine that is rented today may be there, installed and with its model, tomorrow."""

MAX_LIFETIME_S: Final = 7 * 86400.0
"""A token is for a machine about to be set up, not a standing invitation."""

MOST_USES: Final = 1000
"""Peers that one token may let in: the machines of one start-up script."""

ENROLLING_ROLES: Final = (*MEMBER_ROLES, Role.OPERATOR)
"""A coordinator has its certificate from ``init``: it is the authority."""

JOINING_ROLES: Final = (Role.SAMPLER, Role.RELAY)
"""Roles that `heterorl-node join` makes a machine ready for."""

_READABLE: Final = stat.S_IRGRP | stat.S_IROTH
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH

_CLAIMS: Final = {"run_id": "iss", "node_id": "sub", "expires_at_s": "exp", "nonce": "jti"}
"""Fields with a registered claim name (RFC 7519, 4.1)."""


NUMBER_CHARACTERS: Final = 12
"""Enough of a nonce to tell tokens apart; 80 bits of it stay secret."""


class Token(BaseModel):
    """The claims of a token."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=lambda field: _CLAIMS.get(field, field),
        validate_by_name=True,
        serialize_by_alias=True,
    )

    run_id: str = Field(pattern=NAME_PATTERN)
    role: Role
    node_id: str | None = Field(default=None, pattern=NAME_PATTERN)
    """The only node id it admits; None admits any that is not taken."""
    expires_at_s: float = Field(allow_inf_nan=False)
    """Unix seconds on the coordinator's clock."""
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    address: str = Field(min_length=3, max_length=300)
    """host:port of the enrolment service."""
    ca_certificate_pem: str
    learner_public_key: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """With the two fields above, all that run.json says: what `join` needs beside the package."""
    coordinator: str | None = Field(default=None, min_length=3, max_length=300)
    """host:port of the members service, for `join`."""
    uses: int = Field(default=1, ge=1, le=MOST_USES)
    """Peers it may let in."""

    @property
    def number(self) -> str:
        """Name of the token that is no secret, in lists."""
        return self.nonce[:NUMBER_CHARACTERS]

    @property
    def can_join(self) -> bool:
        """Whether it leads to the whole run, as `heterorl-node join` takes it."""
        is_told = self.learner_public_key is not None and self.coordinator is not None
        return is_told and self.role in JOINING_ROLES

    @property
    def run(self) -> RunDescription:
        """The run's description. Raises ValueError: the token does not say it."""
        if self.learner_public_key is None:
            raise ValueError("the token does not say the learner's key")
        return RunDescription(
            run_id=self.run_id,
            ca_certificate_pem=self.ca_certificate_pem.encode(),
            learner_public_key=bytes.fromhex(self.learner_public_key),
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a token and check that the authority in it made it; nothing else is checked.

        Raises RefusedError: TOKEN_REFUSED; it is not a token, or was changed.
        """
        not_a_token = RefusedError(
            Reason.TOKEN_REFUSED,
            "not a token of this version, or damaged",
            fix="copy the whole line, or make a new one with `heterorl-node token`",
        )
        if len(text) > TOKEN_BYTES:
            raise not_a_token
        signed = text.strip()
        try:
            payload = _JWS.decode(signed, options={"verify_signature": False})
            claims = json.loads(payload)
            ca_certificate_pem = claims["ca_certificate_pem"] if isinstance(claims, dict) else ""
            key = read_certificate(str(ca_certificate_pem).encode()).public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise not_a_token
            header = _JWS.decode_complete(signed, key, algorithms=[TOKEN_ALGORITHM])["header"]
        except (jwt.PyJWTError, ValueError, KeyError) as error:
            raise not_a_token from error
        if header.get("typ") != TYPE:
            raise not_a_token
        try:
            return cls.model_validate_json(payload, by_name=False)
        except ValidationError as error:
            raise RefusedError(
                Reason.TOKEN_REFUSED,
                "the token was made by another version of heterorl-node",
                fix="make a new one with `heterorl-node token`, and run the coordinator's version here",
            ) from error


def issue_token(
    authority: Authority,
    *,
    role: Role,
    node_id: str | None,
    address: str,
    now: float,
    lifetime_s: float = DEFAULT_LIFETIME_S,
    uses: int = 1,
    coordinator: str | None = None,
    run: RunDescription | None = None,
) -> str:
    """Make a token, one line of at most TOKEN_BYTES characters.

    Args:
        coordinator, run: what `heterorl-node join` finds in it; other peers are told in their configuration.
    Raises:
        ValueError: a coordinator has none, or ``run`` is another authority's.
    """
    if role not in ENROLLING_ROLES:
        raise ValueError(f"a {role} does not enrol")
    if run is not None and not is_same_certificate(run.ca_certificate_pem, authority.certificate_pem):
        raise ValueError(f"run {run.run_id} has another authority")
    token = Token(
        run_id=authority.run_id,
        role=role,
        node_id=node_id,
        expires_at_s=now + lifetime_s,
        nonce=secrets.token_hex(16),
        address=address,
        ca_certificate_pem=authority.certificate_pem.decode(),
        learner_public_key=None if run is None else run.learner_public_key.hex(),
        coordinator=coordinator,
        uses=uses,
    )
    return authority.sign_token(token.model_dump_json(exclude_defaults=True).encode(), typ=TYPE)


def redeem(text: str, *, authority: Authority, node_id: str, now: float) -> Token:
    """Return a token of this authority that is not expired and fits the peer. Raises RefusedError: else."""
    token = Token.parse(text)
    ask = "ask the operator for a new token"
    if not is_same_certificate(token.ca_certificate_pem.encode(), authority.certificate_pem):
        what, fix = "the token was made by another authority", ask
    elif now >= token.expires_at_s:
        what = f"the token expired {now - token.expires_at_s:.0f} s ago, at {moment(token.expires_at_s)}"
        fix = f"{ask}; one that lasts longer, at most 7d, is made with --ttl"
    elif token.node_id not in (None, node_id):
        what = f"the token is for node {token.node_id}, not {node_id}"
        fix = f"set node.node_id to {token.node_id}, or {ask}"
    else:
        return token
    raise RefusedError(Reason.TOKEN_REFUSED, what, fix=fix)


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A token as it lies on disk."""

    text: str
    token: Token
    exposure: str
    """Who else may read it, for a warning; empty where nobody may."""


def usable_token(token_file: Path | None, directory: Path, *, run: RunDescription, role: Role) -> TokenFile:
    """Return the token, perhaps expired, of a peer without a certificate. Raises StartupError: none fits."""
    if token_file is None:
        raise StartupError(
            f"There is no {role}'s certificate in {directory}, and no token to get one",
            fix="Where `heterorl-node init` ran, set --state-dir to the directory that it made. Elsewhere: "
            f"{how_to_get_a_token(role)}, and set node.token_file (--token-file) to a file that holds it.",
        )
    found, fix = read_token_file(token_file, role=role), f"{how_to_get_a_token(role)}."
    token = found.token
    is_same_authority = is_same_certificate(token.ca_certificate_pem.encode(), run.ca_certificate_pem)
    if token.run_id != run.run_id or not is_same_authority:
        raise StartupError(
            f"The token is for run {token.run_id} of another authority than node.run_file names", fix=fix
        )
    if token.role != role:
        raise StartupError(f"The token is for a {token.role}, this node is a {role}", fix=fix)
    try:
        split_target(token.address)
    except ValueError as error:
        raise StartupError(f"The address in the token cannot be used: {error}", fix=fix) from error
    return found


def read_token_file(path: Path, *, role: Role) -> TokenFile:
    """Read the token of a new peer. Raises StartupError: there is no good one, or others may write it."""
    fix = f"{how_to_get_a_token(role)}."
    try:
        content, status = read_with_status(path, TOKEN_BYTES + 1)
    except OSError as error:
        raise cannot_read(path, error, fix=fix) from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & _WRITABLE:
        raise StartupError(
            f"The token in {path} may be replaced by others: the file has mode {mode:o}",
            fix=f"Run: chmod 600 {path}. If others use this machine, make a new token: "
            "they may have read this one.",
        )
    try:
        text = content.decode("ascii").strip()
        token = Token.parse(text)
    except (UnicodeDecodeError, RefusedError) as error:
        raise StartupError(f"The token in {path} cannot be used: {error}", fix=fix) from error
    exposure = ""
    # Of somebody else's file the group's bit is what lets this process in.
    if mode & (_READABLE if status.st_uid == os.geteuid() else stat.S_IROTH):
        exposure = (
            f"{path} has mode {mode:o}: others on this machine may read the token, and whoever spends it "
            f"first is let in. Run: chmod 600 {path}"
        )
    return TokenFile(text, token, exposure)


def how_to_get_a_token(role: Role) -> str:
    """Return the command that makes a token for a role, as part of a sentence."""
    return (
        f"Make one where the coordinator runs: `heterorl-node token DIR --role {role} --address HOST:PORT "
        "--out FILE`"
    )


def write_token_file(path: Path, token: str) -> None:
    """Write a token that only its owner may read. Raises StartupError: it cannot be written."""
    try:
        write_secret(path, token.encode("ascii") + b"\n")
    except OSError as error:
        raise cannot_make(path, error, fix="Choose a file that can be written.") from error
