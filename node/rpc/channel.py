"""Channels to a hub.

A node dials three of them, one per purpose, each a TCP connection of its own, so that a heartbeat never waits
behind weights. ``call_ends`` says how a call on one of them ends.
"""

import enum
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from node.errors import StartupError
from node.identity.identity_store import Identity, check_dates
from node.identity.own_identity import OwnIdentity
from node.identity.peer import Peer, server_name
from node.rpc.address import is_loopback, split_address
from node.rpc.calls.caller import USER_AGENT_PREFIX
from node.rpc.hub import Hub, HubChannel
from node.rpc.proxy import proxy_to
from node.system.backoff import BACKOFF_CAP_S, CONTRIBUTOR_BACKOFF_CAP_S, FIRST_BACKOFF_S
from node.values.limits import MESSAGE_BYTES
from node.values.roles import Role

Caller: TypeAlias = Identity | OwnIdentity | Peer
"""Who dials: with a certificate, with one that is made anew while the process runs, or with TLS off."""


_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.initial_reconnect_backoff_ms", int(FIRST_BACKOFF_S * 1000)),
    # Otherwise channels to one address share a connection.
    ("grpc.use_local_subchannel_pool", 1),
    # Callers retry where they know that it is safe.
    ("grpc.enable_retries", 0),
    # A hub could answer with a few bytes that inflate to our limit.
    ("grpc.per_message_decompression", 0),
)


class Purpose(enum.StrEnum):
    """The purpose of a channel: the service with the largest messages that it carries."""

    CONTROL = "MembershipService"
    ROLLOUTS = "RolloutService"
    BULK = "PolicyService"
    CONTRIBUTIONS = "MergeService"


@dataclass(frozen=True, slots=True)
class Keepalive:
    """When each end of a connection finds out that the other is gone, by pings.

    One value for both ends: a server takes pings that come too soon for an attack, and ends the connection at
    the third (GOAWAY, too_many_pings). By default gRPC allows one in 5 minutes.
    """

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
            # The limit above holds for a link that is cut. The kernel of a process that stands still goes on
            # acknowledging; only a ping finds that out, and gRPC would wait a minute for its answer.
            ("grpc.http2.ping_timeout_ms", int(self.give_up_after_s * 1000)),
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

_BULK_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    # Bytes a sender may have in flight per stream. The default begins at 64 KiB and grows with the measured
    # speed of the link, which costs a small delta several round trips.
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.http2.bdp_probe", 0),
)


def dial(
    target: str | Hub,
    caller: Caller,
    *,
    purpose: Purpose,
    now: float,
    server: Role = Role.COORDINATOR,
    keepalive: Keepalive = KEEPALIVE,
) -> grpc.aio.Channel:
    """Return a channel to the hub at ``target``; it connects at its first call and reconnects by itself.

    The server must hold a certificate of the caller's run with the name of ``server``'s role, whatever
    ``target`` is: a coordinator is reached through a relay's address, too. To a ``Hub`` each call goes where
    that is then, and by the certificate that the caller has then. A caller without an identity has TLS off,
    on loopback only. ``keepalive`` must be the server's.

    Raises StartupError: the caller's certificate is not valid now, or TLS is off towards another machine.
    """
    if isinstance(caller, OwnIdentity):
        check_dates(caller.current, now)
        hub = target if isinstance(target, Hub) else Hub(target)
        channel = HubChannel(
            hub,
            lambda address: _dialled(address, caller.current, purpose, server, keepalive),
            renewals=lambda: caller.renewals,
        )
        if server is not Role.COORDINATOR:
            # It does not hear of the next certificate, and would refuse the calls of this one at its end.
            caller.watch(lambda _: channel.end_calls())
        return channel
    if isinstance(caller, Identity):
        check_dates(caller, now)
    each = partial(_dialled, caller=caller, purpose=purpose, server=server, keepalive=keepalive)
    return HubChannel(target, each) if isinstance(target, Hub) else each(target)


def _dialled(
    target: str, caller: Identity | Peer, purpose: Purpose, server: Role, keepalive: Keepalive
) -> grpc.aio.Channel:
    cap_s = CONTRIBUTOR_BACKOFF_CAP_S if purpose is Purpose.CONTRIBUTIONS else BACKOFF_CAP_S
    options = _options(target, MESSAGE_BYTES[purpose], keepalive, backoff_cap_s=cap_s)
    if purpose is Purpose.BULK:
        options += _BULK_OPTIONS
    if isinstance(caller, Peer):
        _require_loopback(target)
        options.append(("grpc.primary_user_agent", USER_AGENT_PREFIX + caller.spiffe_id))
        return grpc.aio.insecure_channel(target, options)
    credentials = grpc.ssl_channel_credentials(caller.ca_pem, caller.key_pem, caller.certificate_pem)
    options.append(("grpc.ssl_target_name_override", server_name(caller.run_id, server)))
    return grpc.aio.secure_channel(target, credentials, options)


def dial_as_stranger(target: str, *, run_id: str, ca_pem: bytes) -> grpc.aio.Channel:
    """Return a channel to a run's enrolment port: it verifies the hub; the caller has no name yet."""
    options = _options(target, MESSAGE_BYTES["EnrolmentService"], KEEPALIVE)
    options.append(("grpc.ssl_target_name_override", server_name(run_id, Role.COORDINATOR)))
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(ca_pem), options)


def _options(
    target: str, message_bytes: int, keepalive: Keepalive, *, backoff_cap_s: float = BACKOFF_CAP_S
) -> list[tuple[str, Any]]:
    has_proxy = proxy_to(split_address(target)[0]) is not None
    return [
        *_OPTIONS,
        ("grpc.max_reconnect_backoff_ms", int(backoff_cap_s * 1000)),
        ("grpc.enable_http_proxy", int(has_proxy)),
        *keepalive.client_options,
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
    ]


def _require_loopback(target: str) -> None:
    if not is_loopback(split_address(target)[0]):
        raise StartupError(
            f"TLS is off and {target} is another machine: anyone on the way could read and change everything",
            fix="Set node.tls = true, or use an address of this machine.",
        )
