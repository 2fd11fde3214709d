"""Who a peer is, and how its certificate says so."""

import re
from dataclasses import dataclass
from typing import Final, Self

from node.errors import Reason, RefusedError
from node.values.limits import NAME_PATTERN
from node.values.roles import ROLES, Role

_NAME: Final = re.compile(NAME_PATTERN)
_SCHEME: Final = "spiffe://"

SERVING_ROLES: Final = frozenset(role for role, traits in ROLES.items() if traits.server_name)
"""Roles whose certificates carry a name for clients to verify: see ``server_name``."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of a run, as its certificate names it."""

    run_id: str
    role: Role
    node_id: str

    @property
    def spiffe_id(self) -> str:
        """The URI name in the peer's certificate: ``spiffe://<run>/<role>/<node>``."""
        return f"{_SCHEME}{self.run_id}/{self.role}/{self.node_id}"

    @classmethod
    def from_spiffe_id(cls, text: str) -> Self:
        """Read such a name. Raises RefusedError: UNAUTHENTICATED; it is not the name of a peer."""
        parts = text.removeprefix(_SCHEME).split("/")
        if text.startswith(_SCHEME) and len(parts) == 3:
            run_id, role, node_id = parts
            if is_name(run_id) and role in set(Role) and is_name(node_id):
                return cls(run_id, Role(role), node_id)
        raise RefusedError(Reason.UNAUTHENTICATED, f"{text[:200]!r} is not the name of a peer")


def is_name(text: str) -> bool:
    """Return whether a run or a node may have this name."""
    # fullmatch: in a pattern "$" also matches before a final newline.
    return _NAME.fullmatch(text) is not None


def server_name(run_id: str, role: Role) -> str:
    """Return the DNS name in the certificates of all peers of a run that serve in a role, at whatever host.

    Clients say and verify this name and no other. So addresses may change, no other member can pose as a hub,
    and no relay as a coordinator. A relay's port tells by it whom a client wants.

    Raises ValueError: the role serves nobody.
    """
    if role not in SERVING_ROLES:
        raise ValueError(f"a {role} serves nobody")
    return f"{ROLES[role].server_name}.{run_id}.heterorl"
