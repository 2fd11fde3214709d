"""Keeps a reserve of descriptors: when connections eat into it, some are closed, strangers' first.

gRPC takes in every TCP connection to the members' port and cannot be told to stop: callers without a
certificate are only cut off when their handshake fails or takes too long. With all descriptors gone, nobody
could scrape, fetch or join. So this process shuts connections of the port when there are too many, first
those over which no member has ever called. Their data never passes through here: a socket is found and shut
by its descriptor, and gRPC then finds that its caller has gone.

Samplers behind a relay come from the relay's address. While a relay itself is connected, so that its
certificate proves the address, strangers there may be so many as samplers that it passes on; whoever abuses
that is still a stranger, and is shut before any member.
"""

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from node.errors import CountRefusal, Reason
from node.identity.peer import Peer
from node.rpc.strangers.places import origin
from node.system import descriptors
from node.system.waits import wait_at_most
from node.values.roles import Role

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.25
"""A look costs 3 us, or 3 ms for 1000 connections where Linux is older than 6.2."""

TELL_EVERY_S: Final = 60.0
"""Between two warnings."""

MOST_OWNERS: Final = 1 << 17

RELAYED_STRANGERS: Final = 512
"""Connections from a relay's address that nobody has called over yet: two each of 256 samplers that come back
at once. The relay's own bound on strangers is of the same size."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to a port of this process."""

    descriptor: int
    remote: str
    """As gRPC writes it: ``ipv4:192.0.2.7:51234``."""
    group: str
    """Key it counts under: the member that has called over it, else the address it comes from."""
    is_members: bool
    kept: int = descriptors.CONNECTIONS_PER_PEER
    """How many strangers of the group are kept while there are others."""


def to_shut(connections: Sequence[Connection], excess: int) -> list[Connection]:
    """Return the connections to shut when there are ``excess`` too many.

    Strangers' come first, members' only when there are no others; in both, whoever has the most loses first.
    An address that strangers call from keeps as many as one peer needs, or the samplers behind a relay,
    however small the excess: gRPC would take in others from those that wait.
    """
    seen: Counter[str] = Counter()
    order = []
    held = 0
    for connection in connections:
        seen[connection.group] += 1
        share = seen[connection.group] / connection.kept
        order.append((connection.is_members, -share, connection.descriptor, connection))
        held += not connection.is_members and share > 1
    order.sort(key=lambda each: each[:3])
    return [connection for *_, connection in order[: max(held, excess)]] if excess > 0 else []


class Owners:
    """The members that have called over connections; the least recently used are forgotten past a bound."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, Peer] = OrderedDict()

    def note(self, remote: str, peer: Peer) -> None:
        """Note that a member calls from ``remote``."""
        self._owners[remote] = peer
        self._owners.move_to_end(remote)
        if len(self._owners) > MOST_OWNERS:
            self._owners.popitem(last=False)

    def owner_of(self, remote: str) -> Peer | None:
        """Return who has called from there."""
        return self._owners.get(remote)


class ConnectionGuard:
    """Guards the reserve against the connections of one port."""

    def __init__(self, port: int, owners: Owners, count_refusal: CountRefusal) -> None:
        self._port = port
        self._owners = owners
        self._count_refusal = count_refusal
        self._told_at = -math.inf

    async def run(self, stopping: asyncio.Event) -> None:
        """Guard until ``stopping``."""
        while True:
            await wait_at_most(stopping, LOOK_EVERY_S)
            if stopping.is_set():
                return
            most = descriptors.limit()
            excess = descriptors.open_now() - (most - descriptors.reserve(most))
            if excess > 0:
                await asyncio.to_thread(self._shut, excess, most)

    def _shut(self, excess: int, most: int) -> None:
        shut = to_shut(self._connections(range(most)), excess)
        for connection in shut:
            _with_socket(connection.descriptor, partial(_shut, self._port, connection.remote))
            self._count_refusal(service="connections", reason=Reason.BUSY)
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            logger.warning(
                "connections closed to keep descriptors free",
                extra={
                    "limit": most,
                    "strangers": sum(not each.is_members for each in shut),
                    "members": sum(each.is_members for each in shut),
                    "fix": "raise LimitNOFILE; if strangers hold them, close the port to their addresses",
                },
            )

    def _connections(self, numbers: Sequence[int]) -> list[Connection]:
        found = [
            (number, *caller, self._owners.owner_of(caller[0])) for number, caller in self._callers(numbers)
        ]
        relays = {
            origin(host) for _, _, host, owner in found if owner is not None and owner.role is Role.RELAY
        }
        return [
            Connection(number, remote, origin(host), is_members=False, kept=RELAYED_STRANGERS)
            if owner is None and origin(host) in relays
            else Connection(number, remote, owner.node_id if owner else origin(host), owner is not None)
            for number, remote, host, owner in found
        ]

    def _callers(self, numbers: Sequence[int]) -> Iterator[tuple[int, tuple[str, str]]]:
        with contextlib.suppress(OSError):  # none is left to list them with: each number is tried
            numbers = [int(name) for name in os.listdir("/dev/fd")]
        for number in numbers:
            caller = _with_socket(number, partial(_caller, self._port))
            if caller is not None:
                yield number, caller


def _with_socket(number: int, use: Callable[[socket.socket], Result]) -> Result | None:
    """Return what ``use`` returns for the socket that is descriptor ``number``; None if it is not one."""
    try:
        found = socket.socket(fileno=number)
    except OSError:
        return None
    try:
        return use(found)
    except OSError:
        return None  # it listens, or has ended
    finally:
        found.detach()


def _caller(port: int, found: socket.socket) -> tuple[str, str] | None:
    """Return who is at the other end of a connection to ``port``, as gRPC writes it, and the host alone."""
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
        return None
    host, remote_port = found.getpeername()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"ipv6:%5B{host}%5D:{remote_port}", host
        host = str(address.ipv4_mapped)
    return f"ipv4:{host}:{remote_port}", host


def _shut(port: int, remote: str, found: socket.socket) -> None:
    caller = _caller(port, found)
    if caller is not None and caller[0] == remote:  # else the number is another's by now
        found.shutdown(socket.SHUT_RDWR)
