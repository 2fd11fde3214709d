"""The client side of every call: channels, backoff, and the meaning of gRPC's errors.

A call ends in one of three ways: a response; RefusedError, the hub's decision with its reason;
ConnectionLost, without a decision, to be retried with backoff. A node dials three channels to its
hub, one per purpose, each a TCP connection of its own, so that a heartbeat never waits behind weights.
"""

import asyncio
import contextlib
import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import grpc.aio

from node.errors import HeteroRLError, Reason, RefusedError, StartupError
from node.identity.identity_store import Identity, check_dates
from node.identity.own_identity import OwnIdentity
from node.identity.peer import Peer, server_name
from node.rpc.address import is_loopback, split_address
from node.rpc.calls.auth import USER_AGENT_PREFIX
from node.rpc.hub import Hub, HubChannel
from node.rpc.proxy import proxy_to, ways_followed
from node.system.waits import wait_at_most
from node.values.limits import MESSAGE_BYTES
from node.values.run import Role

Caller: TypeAlias = Identity | OwnIdentity | Peer
"""Who dials: with a certificate, with one that is made anew while the process runs, or with TLS off."""

Request = TypeVar("Request")
Response = TypeVar("Response")

REASON_KEY: Final = "heterorl-reason"
"""Trailing metadata with the reason of a refusal; gRPC's own errors have none."""

_REASONS: Final = {str(reason): reason for reason in Reason}

HUB_CLOCK_KEY: Final = "heterorl-now"
"""Trailing metadata of a refusal: Unix seconds on the hub's clock."""

FIRST_BACKOFF_S: Final = 0.2
BACKOFF_CAP_S: Final = 30.0

_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.initial_reconnect_backoff_ms", int(FIRST_BACKOFF_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(BACKOFF_CAP_S * 1000)),
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


class TlsFailure(enum.Enum):
    """How a handshake failed, as far as gRPC says it."""

    HUB_DATES = enum.auto()
    """The hub's certificate is not valid now, by this machine's clock."""
    CLOSED = enum.auto()
    """The hub closed the connection without a word, as it does on a certificate it does not accept."""


class ConnectionLost(HeteroRLError):  # noqa: N818 - an event of every long run, not a fault
    """A call ended without a response from the hub: it may have taken effect. Retry with backoff."""

    tls: TlsFailure | None = None


class Backoff:
    """Delays that double up to a cap, each drawn between 0 and its ceiling (full jitter)."""

    def __init__(
        self, random: Callable[[], float], *, first_s: float = FIRST_BACKOFF_S, cap_s: float = BACKOFF_CAP_S
    ) -> None:
        """Begin with a ceiling of ``first_s``; ``random`` returns numbers in [0, 1)."""
        self._random = random
        self._first_s = first_s
        self._cap_s = cap_s
        self._ceiling_s = first_s
        self.retries = 0
        """Number of delays drawn."""

    def another(self) -> "Backoff":
        """Return a new one with the same parameters."""
        return Backoff(self._random, first_s=self._first_s, cap_s=self._cap_s)

    def next_s(self) -> float:
        """Draw the next delay, seconds."""
        delay_s = self._random() * self._ceiling_s
        self._ceiling_s = min(2 * self._ceiling_s, self._cap_s)
        self.retries += 1
        return delay_s

    async def wait(self, until: asyncio.Event | None = None) -> None:
        """Wait for the next delay, or until an event if that comes sooner."""
        await wait_at_most(until or asyncio.Event(), self.next_s())

    def reset(self) -> None:
        """Go back to the first ceiling, after a success."""
        self._ceiling_s = self._first_s


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
        if server is Role.RELAY:
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
    options = _options(target, MESSAGE_BYTES[purpose], keepalive)
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


async def call(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
    request: Request,
    *,
    timeout_s: float,
    wait_for_ready: bool = False,
) -> Response:
    """Make a unary call. Raises RefusedError, ConnectionLost: see ``classify``."""
    with classified():
        return await method(request, timeout=timeout_s, wait_for_ready=wait_for_ready)


@contextlib.contextmanager
def classified() -> Iterator[None]:
    """Translate what gRPC raises in the body, which makes a call or reads and writes a stream.

    A call that is cancelled raises CancelledError, as a task that is: ``HubChannel`` cancels calls.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise classify(error) from error
    except asyncio.InvalidStateError as error:
        # write() on a stream that has ended; only reading would say how it ended.
        raise ConnectionLost("the stream ended while writing") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConnectionLost("the call was ended with the others of its channel") from error


def classify(error: grpc.aio.AioRpcError) -> RefusedError | ConnectionLost:
    """Return the refusal or the lost connection that an error stands for.

    A refusal is what carries our reason, and the two limits gRPC enforces by itself.
    A CANCELLED that this side did not cause is gRPC shedding load: it is retried like a lost connection.
    """
    code, details = error.code(), error.details() or ""
    trailing = dict(error.trailing_metadata() or ())
    reason = _REASONS.get(str(trailing.get(REASON_KEY, "")))
    if reason is not None:
        hub_now_s = _seconds(trailing.get(HUB_CLOCK_KEY))
        return RefusedError(reason, details, is_remote=True, hub_now_s=hub_now_s)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return RefusedError(
            Reason.INTERNAL,
            "the server at this address does not know this rpc",
            fix="check host and port, and run the same version everywhere",
            is_remote=True,
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return RefusedError(Reason.OVER_LIMIT, details, is_remote=True)
    return _lost(f"{code.name}: {details}", details)


def _seconds(text: object) -> float | None:
    try:
        seconds = float(str(text))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


def _lost(what: str, details: str) -> ConnectionLost:
    hint, tls = "", None
    if "certificate has expired" in details or "certificate is not yet valid" in details:
        hint = " (the hub's certificate is not valid by this machine's clock: one of the two is wrong)"
        tls = TlsFailure.HUB_DATES
    elif "SSL_ERROR_SSL" in details or "Hostname Verification Check failed" in details:
        hint = " (the server at this address is not a hub of this run)"
    elif "Socket closed" in details:
        hint = (
            " (if this stays so, the hub may not accept this node's certificate: expired or not yet valid by "
            "its clock, or of another run)"
        )
        tls = TlsFailure.CLOSED
    elif details.strip() in ("", "Deadline Exceeded"):
        hint = " (no answer: the line is cut, or large packets are lost; `heterorl-node doctor` tries it)"
    if tls is None and (proxies := ways_followed()):
        hint += f" ({proxies}: `heterorl-node doctor` tries it)"
    lost = ConnectionLost(what + hint)
    lost.tls = tls
    return lost


def _options(target: str, message_bytes: int, keepalive: Keepalive) -> list[tuple[str, Any]]:
    has_proxy = proxy_to(split_address(target)[0]) is not None
    return [
        *_OPTIONS,
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
