"""Keepalive pings: one value for both ends, because a server disconnects clients that ping too often.

    last byte --ping_after_s--> ping --give_up_after_s without an answer--> the connection is dead

A server treats pings that come too soon as an attack: the third ends the connection with GOAWAY,
too_many_pings. By default gRPC allows one in 5 minutes.
"""

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Keepalive:
    """When each end of a connection finds out that the other is gone."""

    ping_after_s: float = 20.0
    """At least 1: gRPC pings no more often."""
    give_up_after_s: float = 10.0
    allowed_every_s: float = 10.0
    """Shortest interval a server accepts. Half of ``ping_after_s``, since delays vary."""

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """Return the channel arguments of either end."""
        return (
            ("grpc.keepalive_time_ms", int(self.ping_after_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.give_up_after_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
        )

    @property
    def client_options(self) -> tuple[tuple[str, Any], ...]:
        """Return the channel arguments of a client, which pings for as long as it sends nothing else."""
        return (*self.options, ("grpc.http2.max_pings_without_data", 0))

    @property
    def server_options(self) -> tuple[tuple[str, Any], ...]:
        """Return the channel arguments of a server."""
        allowed_ms = int(self.allowed_every_s * 1000)
        return (*self.options, ("grpc.http2.min_ping_interval_without_data_ms", allowed_ms))


KEEPALIVE: Final = Keepalive()
"""For every connection of a run: a dead link is found 30 s after its last byte."""
