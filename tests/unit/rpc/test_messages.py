"""What a message may be, and how long one waits for it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from node.errors import Reason, RefusedError
from node.rpc import auth
from node.rpc.messages import bounded_parser, parsed, requests, within

METHOD = "/heterorl.v1.PolicyService/GetManifest"


def refusal(request: Any) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        parsed(request)
    return refused.value


def test_a_message_is_parsed_up_to_the_limit_of_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(auth.MESSAGE_BYTES, "PolicyService", 4)
    assert parsed(bounded_parser(METHOD, bytes.decode)(b"four")) == "four"
    assert parsed(bounded_parser(METHOD, None)(b"four")) == b"four"
    refused = refusal(bounded_parser(METHOD, bytes.decode)(b"fives"))
    assert (refused.reason, refused.what) == (
        Reason.OVER_LIMIT,
        "a message of 5 bytes, PolicyService reads 4",
    )


def test_a_message_that_cannot_be_parsed_is_malformed() -> None:
    refused = refusal(bounded_parser(METHOD, bytes.decode)(b"\xff"))
    assert refused.reason is Reason.MALFORMED
    assert METHOD in refused.what


def test_a_submission_is_read_only_up_to_the_size_of_the_runs_largest_group() -> None:
    parse = bounded_parser("/heterorl.v1.RolloutService/SubmitRollouts", None, submission_bytes=3)
    assert parsed(parse(b"six"[:3])) == b"six"
    assert refusal(parse(b"four")).reason is Reason.OVER_LIMIT


async def stream(*sent: Any) -> AsyncIterator[Any]:
    for each in sent:
        yield each


async def test_requests_are_yielded_until_the_stream_ends_or_one_is_refused() -> None:
    assert [each async for each in requests(stream(1, 2), None)] == [1, 2]
    bad = requests(stream(1, RefusedError(Reason.MALFORMED, "not it"), 2), None)
    assert await anext(bad) == 1
    with pytest.raises(RefusedError, match="not it"):
        await anext(bad)


async def test_who_sends_nothing_for_too_long_is_told_to_try_again() -> None:
    async def silent() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None

    with pytest.raises(RefusedError, match=r"the next message took more than 0\.01 s") as refused:
        await anext(requests(silent(), 0.01))
    assert refused.value.reason is Reason.BUSY


@pytest.mark.parametrize("limit_s", [None, 60.0])
async def test_a_timeout_of_the_body_is_its_own(limit_s: float | None) -> None:
    with pytest.raises(TimeoutError, match="mine"):
        async with within(limit_s, "it"):
            raise TimeoutError("mine")
