import asyncio
import itertools
import time

import grpc.aio
import pytest

from node.errors import Reason, RefusedError
from node.rpc.channel import REASON_KEY, Backoff, ConnectionLost, classified, classify


def failure(code: grpc.StatusCode, details: str = "", reason: str | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata() if reason is None else grpc.aio.Metadata((REASON_KEY, reason))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


@pytest.mark.parametrize("reason", list(Reason))
def test_a_refusal_is_known_by_its_reason_whatever_its_status(reason: Reason) -> None:
    status = grpc.StatusCode[reason.status]
    refused = classify(failure(status, "7 is too many", reason.value))
    assert isinstance(refused, RefusedError)
    assert (refused.reason, str(refused)) == (reason, "7 is too many")


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
)
def test_what_carries_no_reason_of_ours_is_a_lost_connection(code: grpc.StatusCode) -> None:
    lost = classify(failure(code, "went away"))
    assert isinstance(lost, ConnectionLost)
    assert code.name in str(lost)


@pytest.mark.parametrize(
    ("details", "hint"),
    [
        ("certificate has expired", "one of the two is wrong"),
        ("certificate is not yet valid", "one of the two is wrong"),
        ("SSL_ERROR_SSL: wrong version", "not a hub of this run"),
        ("Hostname Verification Check failed", "not a hub of this run"),
        ("Socket closed", "may not accept this node's certificate"),
        ("Connection refused", "Connection refused"),
    ],
)
def test_a_connection_that_tls_ended_says_what_may_be_wrong(details: str, hint: str) -> None:
    lost = str(classify(failure(grpc.StatusCode.UNAVAILABLE, details)))
    assert hint in lost
    assert lost.endswith(")") == (details != hint)


def test_a_reason_nobody_knows_is_not_believed() -> None:
    assert isinstance(classify(failure(grpc.StatusCode.INTERNAL, reason="because")), ConnectionLost)


def test_grpcs_own_limit_on_messages_is_a_refusal() -> None:
    refused = classify(
        failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)")
    )
    assert isinstance(refused, RefusedError)
    assert refused.reason is Reason.OVER_LIMIT


def test_a_write_to_a_stream_that_has_ended_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLost), classified():
        raise asyncio.InvalidStateError


def test_cancellation_and_mistakes_pass_as_they_are() -> None:
    for error in (asyncio.CancelledError(), KeyError("mistake")):
        with pytest.raises(type(error)), classified():
            raise error


def test_ceilings_double_up_to_the_cap_and_start_again_after_success() -> None:
    backoff = Backoff(lambda: 1.0, first_s=0.2, cap_s=3.0)
    assert [backoff.next_s() for _ in range(6)] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.0, 3.0])
    backoff.reset()
    assert backoff.next_s() == pytest.approx(0.2)
    assert backoff.retries == 7


def test_delays_are_drawn_over_the_whole_range_below_the_ceiling() -> None:
    numbers = itertools.cycle([0.0, 0.5, 0.999])
    backoff = Backoff(lambda: next(numbers), first_s=1.0, cap_s=1.0)
    assert [backoff.next_s() for _ in range(3)] == pytest.approx([0.0, 0.5, 0.999])


async def test_a_wait_ends_early_when_its_event_comes() -> None:
    event = asyncio.Event()
    backoff = Backoff(lambda: 1.0, first_s=60.0, cap_s=60.0)
    asyncio.get_running_loop().call_soon(event.set)
    async with asyncio.timeout(5):
        await backoff.wait(event)


async def test_a_wait_without_an_event_lasts_for_the_drawn_delay() -> None:
    started = time.monotonic()
    await Backoff(lambda: 1.0, first_s=0.03).wait()
    assert time.monotonic() - started >= 0.029
