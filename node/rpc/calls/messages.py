"""Bounds on the requests of an rpc: size, parsing, and the wait for the first and for the next one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from node.errors import Reason, RefusedError
from node.rpc.calls.rpc_rules import SUBMIT_ROLLOUTS, service_of
from node.values.limits import MESSAGE_BYTES, ROLLOUT_MESSAGE_BYTES

FIRST_MESSAGE_S: Final = 15.0
"""Longest wait for the first byte of a call's first message, after its headers."""

SLOWEST_UPLOAD_BYTES_PER_S: Final = 512 << 10
"""The largest rollout arrives within its sender's own deadline (``submission_stream.ANSWER_TIMEOUT_S``)."""

_GZIP: Final = b"\x1f\x8b"


def first_message_s(method: str) -> float:
    """Return how long a call's first message may take to arrive, by the size its service reads."""
    return FIRST_MESSAGE_S + MESSAGE_BYTES[service_of(method)] / SLOWEST_UPLOAD_BYTES_PER_S


def bounded_parser(
    method: str,
    parse: Callable[[bytes], Any] | None,
    *,
    submission_bytes: int = ROLLOUT_MESSAGE_BYTES,
    most_fields: int | None = None,
) -> Callable[[bytes], Any]:
    """Return a deserializer that never raises: gRPC would show the caller what it raised.

    For a message it cannot parse, it returns the RefusedError that ``parsed`` raises. The largest request of
    SubmitRollouts has ``submission_bytes``; other rpcs have the limit of their service. ``most_fields``: see
    ``Rule``.
    """
    limit = submission_bytes if method == SUBMIT_ROLLOUTS else MESSAGE_BYTES[service_of(method)]

    def parse_bounded(content: bytes) -> Any:
        if len(content) > limit:
            return RefusedError(
                Reason.OVER_LIMIT, f"a message of {len(content)} bytes, {service_of(method)} reads {limit}"
            )
        try:
            if most_fields is not None and _has_more_fields(content, most_fields):
                return RefusedError(Reason.OVER_LIMIT, f"more than {most_fields} fields in a message")
            return content if parse is None else parse(content)
        except Exception:
            is_compressed = content.startswith(_GZIP)
            return RefusedError(
                Reason.MALFORMED,
                f"not the message that {method} takes",
                fix="call without gRPC's compression" if is_compressed else "",
            )

    return parse_bounded


def _has_more_fields(content: bytes, most: int) -> bool:
    """Whether an encoded message has more fields than ``most``, looking at no more of them.

    Raises IndexError, ValueError: it is not a message.
    """
    at = fields = 0
    while at < len(content) and fields <= most:
        tag, at = _varint(content, at)
        match tag & 7:
            case 0:
                _, at = _varint(content, at)
            case 1:
                at += 8
            case 2:
                size_bytes, at = _varint(content, at)
                at += size_bytes
            case 5:
                at += 4
            case kind:
                raise ValueError(f"wire type {kind}")
        fields += 1
    return fields > most


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the number that is encoded at a place, and the place after it."""
    number = shift = 0
    while (byte := content[at]) & 0x80:
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
    return number | byte << shift, at + 1


def parsed(request: Any) -> Any:
    """Return a parsed request. Raises RefusedError: MALFORMED or OVER_LIMIT; it could not be parsed."""
    if isinstance(request, RefusedError):
        raise request
    return request


async def requests(
    messages: AsyncIterator[Any],
    *,
    first_s: float,
    stall_s: float | None,
    yields_refusals: bool = False,
    wait_s: Callable[[Any], float] | None = None,
) -> AsyncIterator[Any]:
    """Yield a stream's requests.

    Args:
        stall_s: The longest wait for any but the first; None: no limit.
        wait_s: Returns how long a message that has come waits before it is yielded.
    Raises RefusedError: MALFORMED or OVER_LIMIT, unless they are yielded; BUSY when none came in time.
    """
    limit_s: float | None = first_s
    what = "the first message"
    while True:
        try:
            if limit_s is None:
                message = await anext(messages)
            else:
                async with within(limit_s, what):
                    message = await anext(messages)
        except StopAsyncIteration:
            return
        if wait_s is not None and (pause_s := wait_s(message)):
            await asyncio.sleep(pause_s)
        yield message if yields_refusals else parsed(message)
        limit_s, what = stall_s, "the next message"


async def only_request(messages: AsyncIterator[Any], *, first_s: float) -> Any:
    """Return the one request of a unary call.

    Raises RefusedError: as ``requests``; MALFORMED if the call ended without one.
    """
    async for request in requests(messages, first_s=first_s, stall_s=None):
        return request
    raise RefusedError(Reason.MALFORMED, "the call ended without a message")


@contextlib.asynccontextmanager
async def within(limit_s: float | None, what: str) -> AsyncIterator[None]:
    """Refuse as BUSY if the body takes longer than ``limit_s`` seconds; None sets no limit.

    A TimeoutError of the body's own passes.
    """
    try:
        async with asyncio.timeout(limit_s) as deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise RefusedError(Reason.BUSY, f"{what} took more than {limit_s:g} s", fix="try again") from error
