"""Limits on a message, and on the wait for it."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import pytest

from heterorl.v1 import policy_pb2
from node.errors import Reason, RefusedError
from node.rpc.calls.messages import bounded_parser, first_message_s, only_request, parsed, requests, within
from node.values import limits
from support.refusals import refused

METHOD = "/heterorl.v1.PolicyService/GetManifest"


def refusal(request: Any) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        parsed(request)
    return refused.value


def test_a_message_is_parsed_up_to_the_limit_of_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.MESSAGE_BYTES, "PolicyService", 4)
    assert parsed(bounded_parser(METHOD, bytes.decode)(b"four")) == "four"
    assert parsed(bounded_parser(METHOD, None)(b"four")) == b"four"
    refused = refusal(bounded_parser(METHOD, bytes.decode)(b"fives"))
    assert (refused.reason, refused.what) == (
        Reason.OVER_LIMIT,
        "a message of 5 bytes, PolicyService reads 4",
    )


def test_a_submission_is_read_only_up_to_the_size_of_the_runs_largest_group() -> None:
    parse = bounded_parser("/heterorl.v1.RolloutService/SubmitRollouts", None, submission_bytes=3)
    assert parsed(parse(b"six"[:3])) == b"six"
    assert refusal(parse(b"four")).reason is Reason.OVER_LIMIT


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        (b"", 0),
        (b"\x0a\x00", 1),
        (b"\x0a\x03\x12\x01\x00" + 3 * b"\x12\x00", 4),  # the fields of a part are not counted
        (b"\x0a\x80\x01" + bytes(128) + b"\x12\x00", 2),
        (b"\x18\xff\xff\x03\x25four\x29eight...\x92\x03\x01x", 4),  # of every kind
    ],
)
def test_a_messages_fields_are_counted_before_it_is_parsed(content: bytes, fields: int) -> None:
    for most in range(fields + 3):
        request = bounded_parser(METHOD, lambda _: "parsed", most_fields=most)(content)
        if most >= fields:
            assert parsed(request) == "parsed"
        else:
            assert refusal(request).reason is Reason.OVER_LIMIT


@pytest.mark.parametrize("content", [b"\x0a", b"\x0b\x00", b"\x80" * 4096, b"\x08" + b"\xff" * 4096, b"\x0f"])
def test_what_is_no_message_is_malformed_before_it_is_parsed(content: bytes) -> None:
    request = bounded_parser(METHOD, lambda _: pytest.fail("parsed"), most_fields=4)(content)
    assert refusal(request).reason is Reason.MALFORMED


async def stream(*sent: Any) -> AsyncIterator[Any]:
    for each in sent:
        yield each


async def test_requests_are_yielded_until_the_stream_ends_or_one_is_refused() -> None:
    assert [each async for each in requests(stream(1, 2), first_s=5, stall_s=None)] == [1, 2]
    bad = requests(stream(1, RefusedError(Reason.MALFORMED, "not it"), 2), first_s=5, stall_s=None)
    assert await anext(bad) == 1
    with refused(Reason.MALFORMED):
        await anext(bad)


async def stalling(*sent: Any) -> AsyncIterator[Any]:
    for each in sent:
        yield each
    await asyncio.Event().wait()


async def test_who_sends_nothing_for_too_long_is_told_to_try_again() -> None:
    for sent, first_s, stall_s in (((), 0.01, 60.0), ((1,), 60.0, 0.01)):
        with refused(Reason.BUSY, "0.01 s"):
            assert [each async for each in requests(stalling(*sent), first_s=first_s, stall_s=stall_s)] == []


async def test_a_unary_call_has_one_message_and_may_not_end_without() -> None:
    assert await only_request(stream(1, 2), first_s=5) == 1
    with refused(Reason.MALFORMED):
        await only_request(stream(), first_s=5)


def test_the_largest_rollout_may_take_as_long_as_its_sender_waits_and_a_strangers_message_seconds() -> None:
    assert 150 <= first_message_s("/heterorl.v1.RolloutService/SubmitRollouts") < 180
    assert first_message_s("/heterorl.v1.EnrolmentService/Enrol") < 16


async def test_a_compressed_message_is_malformed_and_its_sender_is_told_so() -> None:
    refused = refusal(bounded_parser(METHOD, policy_pb2.GetManifestRequest.FromString)(gzip.compress(b"x")))
    assert refused.reason is Reason.MALFORMED
    assert refused.fix == "call without gRPC's compression"


@pytest.mark.parametrize("limit_s", [None, 60.0])
async def test_a_timeout_of_the_body_is_its_own(limit_s: float | None) -> None:
    with pytest.raises(TimeoutError, match="mine"):
        async with within(limit_s, "it"):
            raise TimeoutError("mine")
