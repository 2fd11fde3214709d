"""Single-use tokens: how an operator lets one new peer in.

    hrl1.<payload, base64url JSON>.<signature of the run's authority, base64url>

A token carries the authority's certificate, so its holder knows the hub before it knows anything
else; it is a secret until it is spent or has expired. Whether it was spent before is not decided
here: ``enrolment_ledger`` remembers.
"""

import base64
import secrets
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field

from node.enrolment.authority import Authority, is_signed_by
from node.errors import Reason, RefusedError
from node.identity.certificates import is_same_certificate
from node.limits import NAME_PATTERN, TOKEN_BYTES
from node.run import Role

PREFIX: Final = "hrl1"
DEFAULT_LIFETIME_S: Final = 3600.0
MAX_LIFETIME_S: Final = 7 * 86400.0
"""A token is for a machine about to be set up, not a standing invitation."""

ENROLLING_ROLES: Final = (Role.SAMPLER, Role.LEARNER, Role.RELAY, Role.OPERATOR)
"""A coordinator has its certificate from ``init``: it is the authority."""

_DOMAIN: Final = b"heterorl-token-v1\0"


class Token(BaseModel):
    """What a token says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str = Field(pattern=NAME_PATTERN)
    role: Role
    node_id: str | None = Field(pattern=NAME_PATTERN)
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
        not_a_token = RefusedError(
            Reason.TOKEN_REFUSED, "not a token of this kind, or damaged", fix="copy the whole line"
        )
        if len(text) > TOKEN_BYTES:
            raise not_a_token
        parts = text.strip().split(".")
        if len(parts) != 3 or parts[0] != PREFIX:
            raise not_a_token
        try:
            payload, signature = map(_decode, parts[1:])
            token = cls.model_validate_json(payload)
            is_genuine = is_signed_by(token.ca_certificate_pem.encode(), _DOMAIN + payload, signature)
        except ValueError as error:
            raise not_a_token from error
        if not is_genuine:
            raise not_a_token
        return token


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
    payload = (
        Token(
            run_id=authority.run_id,
            role=role,
            node_id=node_id,
            expires_at_s=now + lifetime_s,
            nonce=secrets.token_hex(16),
            address=address,
            ca_certificate_pem=authority.certificate_pem.decode(),
        )
        .model_dump_json()
        .encode()
    )
    return ".".join((PREFIX, _encode(payload), _encode(authority.sign(_DOMAIN + payload))))


def redeem(text: str, *, authority: Authority, node_id: str, now: float) -> Token:
    """Give what a token admits, if it is this authority's, not expired, and fits the peer.

    Raises:
        RefusedError: TOKEN_REFUSED, with the reason in words.
    """
    token = Token.parse(text)
    ask = "ask the operator for a new token"
    if not is_same_certificate(token.ca_certificate_pem.encode(), authority.certificate_pem):
        raise RefusedError(Reason.TOKEN_REFUSED, "the token was made by another authority", fix=ask)
    if now >= token.expires_at_s:
        raise RefusedError(
            Reason.TOKEN_REFUSED, f"the token expired {now - token.expires_at_s:.0f} s ago", fix=ask
        )
    if token.node_id not in (None, node_id):
        raise RefusedError(
            Reason.TOKEN_REFUSED,
            f"the token is for node {token.node_id}, not {node_id}",
            fix=f"set node.node_id to {token.node_id}, or {ask}",
        )
    return token


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    content = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _encode(content) != text:
        raise ValueError("one content has one text")
    return content
