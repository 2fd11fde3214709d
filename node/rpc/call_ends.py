"""The three ways in which a call ends: an answer, a refusal, a lost connection.

RefusedError is the hub's decision, with its reason. ConnectionLost comes without one: try again, with
backoff.
"""

import asyncio
import contextlib
import enum
import math
from collections.abc import Iterator
from typing import Final, TypeVar

import grpc
import grpc.aio

from node.errors import HeteroRLError, Reason, RefusedError
from node.rpc.proxy import ways_followed

Request = TypeVar("Request")

Response = TypeVar("Response")

REASON_KEY: Final = "heterorl-reason"
"""Trailing metadata with the reason of a refusal; gRPC's own errors have none."""

_REASONS: Final = {str(reason): reason for reason in Reason}

HUB_CLOCK_KEY: Final = "heterorl-now"
"""Trailing metadata of a refusal: Unix seconds on the hub's clock."""


class TlsFailure(enum.Enum):
    """How a handshake failed, as far as gRPC says it."""

    HUB_DATES = enum.auto()
    """The hub's certificate is not valid now, by this machine's clock."""
    CLOSED = enum.auto()
    """The hub closed the connection without a word, as it does on a certificate it does not accept."""


class ConnectionLost(HeteroRLError):  # noqa: N818 - an event of every long run, not a fault
    """A call ended without a response from the hub: it may have taken effect. Retry with backoff."""

    tls: TlsFailure | None = None


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
