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
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from node import limits
from node.errors import HeteroRLError, Reason, RefusedError, StartupError
from node.identity.identity_store import Identity, check_dates
from node.identity.peer import Peer, hub_name
from node.rpc.address import is_loopback, split_address
from node.rpc.auth import ENROLMENT_MESSAGE_BYTES, USER_AGENT_PREFIX
from node.rpc.keepalive import KEEPALIVE, Keepalive
from node.waits import wait_at_most

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
    """The purpose of a channel."""

    CONTROL = "control"
    ROLLOUTS = "rollouts"
    BULK = "bulk"


_MESSAGE_BYTES: Final = {
    Purpose.CONTROL: limits.CONTROL_MESSAGE_BYTES,
    Purpose.ROLLOUTS: limits.ROLLOUT_MESSAGE_BYTES,
    Purpose.BULK: limits.BULK_MESSAGE_BYTES,
}


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
    target: str, caller: Identity | Peer, *, purpose: Purpose, now: float, keepalive: Keepalive = KEEPALIVE
) -> grpc.aio.Channel:
    """Return a channel to the hub at ``target``; it connects at its first call and reconnects by itself.

    The server must hold a certificate of the caller's run with the hub name, whatever ``target`` is.

    Args:
        target: host:port.
        caller: an identity for mutual TLS; a peer without one if TLS is off, on loopback only.
        purpose: determines the largest message.
        now: Unix seconds.
        keepalive: the same as the server's.
    Raises:
        StartupError: the caller's certificate is not valid now, or TLS is off towards another machine.
    """
    options = _options(_MESSAGE_BYTES[purpose], keepalive)
    if purpose is Purpose.BULK:
        options += _BULK_OPTIONS
    if isinstance(caller, Peer):
        _require_loopback(target)
        options.append(("grpc.primary_user_agent", USER_AGENT_PREFIX + caller.spiffe_id))
        return grpc.aio.insecure_channel(target, options)
    check_dates(caller, now)
    credentials = grpc.ssl_channel_credentials(caller.ca_pem, caller.key_pem, caller.certificate_pem)
    options.append(("grpc.ssl_target_name_override", hub_name(caller.run_id)))
    return grpc.aio.secure_channel(target, credentials, options)


def dial_as_stranger(target: str, *, run_id: str, ca_pem: bytes) -> grpc.aio.Channel:
    """Return a channel to a run's enrolment port: it verifies the hub; the caller has no name yet."""
    options = _options(ENROLMENT_MESSAGE_BYTES, KEEPALIVE)
    options.append(("grpc.ssl_target_name_override", hub_name(run_id)))
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(ca_pem), options)


async def call(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
    request: Request,
    *,
    timeout_s: float,
    wait_for_ready: bool = False,
) -> Response:
    """Make a unary call.

    Raises:
        RefusedError, ConnectionLost: see ``classify``.
    """
    with classified():
        return await method(request, timeout=timeout_s, wait_for_ready=wait_for_ready)


@contextlib.contextmanager
def classified() -> Iterator[None]:
    """Translate what gRPC raises in the body, which makes a call or reads and writes a stream."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise classify(error) from error
    except asyncio.InvalidStateError as error:
        # write() on a stream that has ended; only reading would say how it ended.
        raise ConnectionLost("the stream ended while writing") from error


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
    lost = ConnectionLost(what + hint)
    lost.tls = tls
    return lost


def _options(message_bytes: int, keepalive: Keepalive) -> list[tuple[str, Any]]:
    return [
        *_OPTIONS,
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
