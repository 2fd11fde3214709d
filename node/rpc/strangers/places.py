"""Places for connections of callers that nobody knows yet, in all and by address; pure.

A newcomer beyond a bound takes the place of the oldest connection: of its own address if that has its share
already, else of the address that has the most. A connection keeps its place for a while; if all are so
young, the newcomer gets none. One address can therefore crowd out itself, and nobody else.

A connection that has settled is a known caller's: no newcomer displaces it, and only a bound of its own
counts it with others of its address.
"""

import ipaddress
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Connection = TypeVar("Connection", bound=Hashable)


class NoPlaceError(Exception):
    """Every place that a newcomer could take was taken a moment ago."""


@dataclass(frozen=True, slots=True)
class PlaceLimits:
    """Number of places."""

    connections: int
    per_address: int
    kept_s: float = 0.0
    """A connection younger than that does not lose its place."""
    settled_per_address: float = float("inf")
    """With so many settled ones, an address gets no further place."""


class Places(Generic[Connection]):
    """Callers that hold a place."""

    def __init__(self, limits: PlaceLimits) -> None:
        self._limits = limits
        self._since: dict[str, dict[Connection, float]] = {}
        """Address -> its connections that have not settled, the oldest first -> when each came."""
        self._settled: Counter[str] = Counter()
        """Address -> its connections that have."""
        self._addresses: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def enter(self, connection: Connection, address: str, *, now: float) -> Connection | None:
        """Assign a newcomer a place; return the connection that loses its own for that, if one does.

        Raises NoPlaceError: all that could lose theirs are too young, or there are none.
        """
        displaced = None
        if self._settled[address] >= self._limits.settled_per_address:
            raise NoPlaceError
        if len(self._since.get(address, ())) >= self._limits.per_address:
            displaced = self._oldest(address, now)
        elif len(self) >= self._limits.connections:
            if not self._since:
                raise NoPlaceError
            displaced = self._oldest(max(self._since, key=lambda each: len(self._since[each])), now)
        if displaced is not None:
            self.leave(displaced)
        self._since.setdefault(address, {})[connection] = now
        self._addresses[connection] = address
        return displaced

    def settle(self, connection: Connection) -> None:
        """Note that a connection is a known caller's, if it still has its place."""
        address = self._addresses.get(connection)
        if address is not None and self._forget(connection, address):
            self._settled[address] += 1

    def leave(self, connection: Connection) -> None:
        """Free a connection's place, if it still has one."""
        address = self._addresses.pop(connection, None)
        if address is not None and not self._forget(connection, address):
            self._settled[address] -= 1
            if not self._settled[address]:
                del self._settled[address]

    def _forget(self, connection: Connection, address: str) -> bool:
        """Forget a connection that has not settled; return whether it had not."""
        since = self._since.get(address, {})
        if connection not in since:
            return False
        del since[connection]
        if not since:
            del self._since[address]
        return True

    def _oldest(self, address: str, now: float) -> Connection:
        connection, since = next(iter(self._since[address].items()))
        if now - since < self._limits.kept_s:
            raise NoPlaceError
        return connection


def origin(host: str) -> str:
    """Return what counts as one address: of IPv6 the /64, which is what one customer is given."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host
