"""Single-use tokens: how an operator lets one new peer in.

A token is a JSON Web Token (ES256) signed by the run's authority. It carries the authority's certificate, so
that its holder can tell the coordinator from a stranger; it is a secret until it is spent or has expired.
Whether it was spent before is not decided here: ``enrolment_ledger`` remembers.
"""

import json
import secrets
from typing import Final, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.enrolment.authority import TOKEN_ALGORITHM, Authority
from node.errors import Reason, RefusedError
from node.identity.certificates import is_same_certificate, read_certificate
from node.identity.clock_skew import moment
from node.limits import NAME_PATTERN, TOKEN_BYTES
from node.run import Role

TYPE: Final = "heterorl-token+jwt"
"""Header ``typ``: nothing else that the authority might sign passes for a token (RFC 8725, 3.11)."""

_JWS: Final = jwt.PyJWS(algorithms=[TOKEN_ALGORITHM])

_OLD_PREFIX: Final = "hrl1."
"""Of tokens made before they were JSON Web Tokens."""

DEFAULT_LIFETIME_S: Final = 2 * 86400.0
"""A machine that is rented today may be there, installed and with its model, tomorrow."""

MAX_LIFETIME_S: Final = 7 * 86400.0
"""A token is for a machine about to be set up, not a standing invitation."""

ENROLLING_ROLES: Final = (Role.SAMPLER, Role.LEARNER, Role.RELAY, Role.OPERATOR)
"""A coordinator has its certificate from ``init``: it is the authority."""


_CLAIMS: Final = {"run_id": "iss", "node_id": "sub", "expires_at_s": "exp", "nonce": "jti"}
"""Fields with a registered claim name (RFC 7519, 4.1)."""


class Token(BaseModel):
    """What a token says."""

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

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a token and check that the authority in it made it; nothing else is checked.

        Raises:
            RefusedError: TOKEN_REFUSED; it is no token, or was changed.
        """
        if text.startswith(_OLD_PREFIX):
            raise _of_another_version()
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
            token = cls.model_validate_json(payload, by_name=False)
        except ValidationError as error:
            raise _of_another_version() from error
        return token


def _of_another_version() -> RefusedError:
    return RefusedError(
        Reason.TOKEN_REFUSED,
        "the token was made by another version of heterorl-node",
        fix="make a new one with `heterorl-node token`, and run the coordinator's version here",
    )


def issue_token(
    authority: Authority,
    *,
    role: Role,
    node_id: str | None,
    address: str,
    now: float,
    lifetime_s: float = DEFAULT_LIFETIME_S,
) -> str:
    """Make a token, one line of at most TOKEN_BYTES characters.

    Raises:
        ValueError: a coordinator needs none, the lifetime is not in (0, MAX_LIFETIME_S], or a name is wrong.
    """
    if role not in ENROLLING_ROLES:
        raise ValueError(f"a {role} does not enrol")
    if not 0 < lifetime_s <= MAX_LIFETIME_S:
        raise ValueError(f"a token lives for at most {MAX_LIFETIME_S:.0f} s, not {lifetime_s:g}")
    token = Token(
        run_id=authority.run_id,
        role=role,
        node_id=node_id,
        expires_at_s=now + lifetime_s,
        nonce=secrets.token_hex(16),
        address=address,
        ca_certificate_pem=authority.certificate_pem.decode(),
    )
    return authority.sign_token(token.model_dump_json(exclude_none=True).encode(), typ=TYPE)


def redeem(text: str, *, authority: Authority, node_id: str, now: float) -> Token:
    """Return what a token admits, if it is this authority's, not expired, and fits the peer.

    Raises:
        RefusedError: TOKEN_REFUSED, with the reason in words.
    """
    token = Token.parse(text)
    ask = "ask the operator for a new token"
    if not is_same_certificate(token.ca_certificate_pem.encode(), authority.certificate_pem):
        raise RefusedError(Reason.TOKEN_REFUSED, "the token was made by another authority", fix=ask)
    if now >= token.expires_at_s:
        raise RefusedError(
            Reason.TOKEN_REFUSED,
            f"the token expired {now - token.expires_at_s:.0f} s ago, at {moment(token.expires_at_s)}",
            fix=f"{ask}; one that lasts longer, at most 7d, is made with --ttl",
        )
    if token.node_id not in (None, node_id):
        raise RefusedError(
            Reason.TOKEN_REFUSED,
            f"the token is for node {token.node_id}, not {node_id}",
            fix=f"set node.node_id to {token.node_id}, or {ask}",
        )
    return token
