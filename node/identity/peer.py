"""Who a peer is, and how its certificate says so."""

import re
from dataclasses import dataclass
from typing import Final, Self

from node.errors import Reason, RefusedError
from node.limits import NAME_PATTERN
from node.run import Role

_NAME: Final = re.compile(NAME_PATTERN)
_SCHEME: Final = "spiffe://"

HUB_ROLES: Final = frozenset({Role.COORDINATOR, Role.RELAY})
"""Roles that serve others. Only their certificates carry the run's hub name."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of a run, as its certificate names it."""

    run_id: str
    role: Role
    node_id: str

    def __hash__(self) -> int:
        # Node ids are unique but for their role. All fields took 2 us, eight times a heartbeat.
        return hash(self.node_id)

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


def hub_name(run_id: str) -> str:
    """Return the DNS name in the certificate of every hub of the run, whatever host it is reached at.

    Clients verify this name and no other. So addresses may change, and no other member can pose as a hub.
    """
    return f"hub.{run_id}.heterorl"
