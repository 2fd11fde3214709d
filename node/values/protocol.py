"""Which protocols this software speaks, and whether it has one in common with another; pure.

The number goes up by one with each release that changes what is said on the wire. A release speaks its own
protocol and the one before, so a run is upgraded one process at a time; ``docs/protocol.md`` has the rules.
"""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from node.errors import Reason, RefusedError

UNNUMBERED: Final = 1
"""The protocol of those that name none: release 0.2.0, and relays of 0.3.0 that carry samplers."""

SPLICED: Final = 3
"""From this one on, relays have a name of their own in TLS and pass samplers' connections on."""

_PROTOCOLS: Final = 1_000_000
_VERSION_CHARACTERS: Final = 50


@dataclass(frozen=True, slots=True)
class Spoken:
    """The protocols that a process speaks."""

    protocol: int
    """The newest."""
    oldest_protocol: int
    software_version: str = ""
    """For people."""


OURS: Final = Spoken(protocol=3, oldest_protocol=2, software_version=version("heterorl-node"))


def spoken_by(*, protocol: int, oldest_protocol: int, software_version: str) -> Spoken:
    """Return what another process says that it speaks, 0 where it says nothing.

    Raises RefusedError: MALFORMED; no process speaks that.
    """
    spoken = Spoken(
        protocol or UNNUMBERED,
        oldest_protocol or UNNUMBERED,
        "".join(filter(str.isprintable, software_version))[:_VERSION_CHARACTERS],
    )
    if not 1 <= spoken.oldest_protocol <= spoken.protocol <= _PROTOCOLS:
        raise RefusedError(Reason.MALFORMED, f"protocols {oldest_protocol} to {protocol}")
    return spoken


def check_common(peer: Spoken, coordinator: Spoken, *, peer_name: str) -> None:
    """Check that a peer and its coordinator speak a protocol in common.

    Raises RefusedError: PROTOCOL_MISMATCH; says which of the two to upgrade.
    """
    if peer.protocol >= coordinator.oldest_protocol and coordinator.protocol >= peer.oldest_protocol:
        return
    is_peer_older = peer.protocol < coordinator.oldest_protocol
    older, newer = (peer_name, coordinator) if is_peer_older else ("the coordinator", peer)
    raise RefusedError(
        Reason.PROTOCOL_MISMATCH,
        f"{peer_name} speaks {_said(peer)}, the coordinator {_said(coordinator)}",
        fix=f"upgrade {older} to a heterorl-node that speaks protocol {newer.oldest_protocol} or newer"
        + (f", such as {newer.software_version}" if newer.software_version else ""),
    )


def _said(spoken: Spoken) -> str:
    by = f" (heterorl-node {spoken.software_version})" if spoken.software_version else ""
    if spoken.protocol == spoken.oldest_protocol:
        return f"protocol {spoken.protocol}{by}"
    return f"protocols {spoken.oldest_protocol} to {spoken.protocol}{by}"
