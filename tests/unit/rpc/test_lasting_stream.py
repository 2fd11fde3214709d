"""Pauses between the streams of a client that always comes again."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import grpc.aio
import pytest

from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.rpc.lasting_stream import LastingStream
from node.system.backoff import Backoff


class ScriptedCall:
    """A stream on which some messages come before it ends."""

    def __init__(self, *messages: str, end: Exception | None) -> None:
        self._messages = iter(messages)
        self._end = end

    async def write(self, message: str) -> None:
        """Send a message, which goes nowhere."""

    async def read(self) -> Any:
        if (message := next(self._messages, None)) is not None:
            return message
        if self._end is not None:
            raise self._end
        return grpc.aio.EOF

    def cancel(self) -> None:
        """End it."""


class NotedPauses(Backoff):
    """A backoff that waits for nothing."""

    def __init__(self) -> None:
        super().__init__(lambda: 1.0, first_s=1.0, cap_s=8.0)
        self.pauses_s: list[float] = []

    async def wait(self, until: asyncio.Event | None = None) -> None:
        self.pauses_s.append(self.next_s())


BUSY = RefusedError(Reason.BUSY, "not now")
LOST = ConnectionLost("cut")


@pytest.mark.parametrize(
    ("ends", "heard", "pauses_s"),
    [
        ([BUSY] * 5, ["terms"], [1, 2, 4, 8, 8]),
        ([LOST] * 3, ["terms"], [1, 1, 1]),
        ([LOST] * 3, [], [1, 2, 4]),
        ([BUSY, BUSY, LOST, BUSY], ["terms"], [1, 2, 1, 2]),
        ([None, None], ["terms"], [1, 1]),
    ],
    ids=["refused", "lost", "never reached", "lost in between", "ended in good order"],
)
async def test_pauses_grow_until_a_stream_is_lost_that_was_not_refused(
    ends: list[Exception | None], heard: list[str], pauses_s: list[float]
) -> None:
    calls: Iterator[ScriptedCall] = iter([ScriptedCall(*heard, end=end) for end in ends])
    told: list[object] = []
    backoff = NotedPauses()

    def refused(refusal: RefusedError) -> Any:
        told.append(refusal)
        return nullcontext()

    stream = LastingStream[str, str](
        rpc=lambda: next(calls),
        hello=lambda: "hello",
        owed=tuple,
        hear=lambda _: None,
        refused=refused,
        lost=told.append,
        backoff=backoff,
    )
    with pytest.raises(RuntimeError):  # no call is left
        await stream.run()
    assert backoff.pauses_s == pauses_s
    assert told == [end for end in ends if end is not None]
