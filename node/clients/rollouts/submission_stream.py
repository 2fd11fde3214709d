"""The clients' half of SubmitRollouts: one stream, many groups on their way, answers in their order.

submit --room in bytes--> unwritten --all there are, in one request--> waiting --answer--> verdict or refusal
                                                                            |
        the next request opens another stream; what waited is sent again <--'-- the stream ended

Several groups go in one request only where the hub of this stream has said that it reads so many, so the
first ones of a stream go alone. It is written and read only while something waits: one that is dropped
between two groups leaves no task behind.
"""

import asyncio
from collections import deque
from typing import Any, Final

import grpc.aio

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost, classified
from node.system.byte_room import ByteRoom
from node.system.waits import drop, put_away
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import Verdict
from node.values.limits import GROUPS_PER_REQUEST, JOINED_GROUPS_BYTES
from node.wire.mapping import member_from_wire
from node.wire.rollouts import submission_to_wire

ANSWER_TIMEOUT_S: Final = 150.0
"""Longest wait for the next answer: the largest group (72 MiB) at 5 Mbit/s."""

IN_FLIGHT_BYTES: Final = 16 << 20
"""Written and not answered: 400 Mbit/s over a round trip of 300 ms."""

_ENDED: Final = "the hub ended the stream"

Answer = tuple[Verdict, str]

_Call = grpc.aio.StreamStreamCall[rollout_pb2.SubmitRolloutsRequest, rollout_pb2.SubmitRolloutsResponse]


class SubmissionStream:
    """A stream that opens when something is submitted; used on the event loop's thread."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        self._call: _Call | None = None
        self._per_request = 1
        """How many groups the hub at the other end of the call reads in one request."""
        self._writer: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._unwritten: dict[asyncio.Future[Answer], EncodedGroup] = {}
        self._waiting: deque[asyncio.Future[Answer]] = deque()
        self._singly = 0
        """How many groups go one at a time, since a stream was refused for good while several were on their
        way: one of them may be why, and it is to be found out which."""
        self._room = ByteRoom(IN_FLIGHT_BYTES)

    async def submit(self, group: EncodedGroup) -> Answer:
        """Submit a group and return the hub's verdict and its reason; safe to repeat.

        Raises RefusedError, ConnectionLost: see ``node.rpc.channel``. What the stream is refused for goes to
        all groups on their way; a final refusal only where there is one group, else ConnectionLost.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        await self._room.take(group.size_bytes)
        try:
            self._unwritten[answer] = group
            if self._writer is None or self._writer.done():
                self._writer = asyncio.create_task(self._write())
            return await answer
        finally:
            self._unwritten.pop(answer, None)
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # looked at, or it would be logged as lost where the caller was cancelled
            self._room.give_back(group.size_bytes)

    async def close(self) -> None:
        """End the stream; those that wait are told that it ended."""
        await put_away(*filter(None, (self._writer, self._reader)))
        ended = ConnectionLost(_ENDED)
        if self._call is not None:
            self._end(self._call, ended)
        for answer in self._unwritten:
            _fail(answer, ended)

    async def _write(self) -> None:
        """Write what is unwritten, until nothing is."""
        while self._unwritten:
            groups = self._next_request()
            try:
                request = submission_to_wire(*groups.values())
                call = self._call = self._call or self._stub.SubmitRollouts()
            except Exception as error:  # the callers' to handle, whatever it is
                for answer in groups:
                    _fail(answer, error)
                continue
            self._waiting += groups
            if self._reader is None or self._reader.done():
                self._reader = asyncio.create_task(self._read(call))
            await _write_to(call, request, reader=self._reader)
            if self._singly:
                await asyncio.wait(groups)

    def _next_request(self) -> dict["asyncio.Future[Answer]", EncodedGroup]:
        """Remove the groups of the next request from those that are unwritten, and return them."""
        most, left_bytes = 1 if self._singly else self._per_request, JOINED_GROUPS_BYTES
        groups: dict[asyncio.Future[Answer], EncodedGroup] = {}
        for answer, group in self._unwritten.items():
            left_bytes -= group.size_bytes
            if groups and (len(groups) == most or left_bytes < 0):
                break
            groups[answer] = group
        for answer in groups:
            del self._unwritten[answer]
        return groups

    async def _read(self, call: Any) -> None:
        """Settle what waits, until nothing does or the stream ends."""
        ended: RefusedError | ConnectionLost | None = ConnectionLost(_ENDED)
        try:
            with classified():
                while self._waiting:
                    async with asyncio.timeout(ANSWER_TIMEOUT_S):
                        response = await call.read()
                    if response is grpc.aio.EOF:
                        return
                    self._singly = max(0, self._singly - len(response.answers))
                    self._per_request = max(1, min(response.groups_per_request, GROUPS_PER_REQUEST))
                    for each in response.answers:
                        _settle(self._waiting.popleft(), each)
            ended = None
        except (RefusedError, ConnectionLost) as error:
            ended = error
        except TimeoutError:
            ended = ConnectionLost(f"no answer to a group for {ANSWER_TIMEOUT_S:g} s")
        except IndexError:
            ended = ConnectionLost("the hub answered more groups than it was sent")
        finally:
            if ended is not None:
                self._end(call, ended)

    def _end(self, call: "_Call", ended: RefusedError | ConnectionLost) -> None:
        """End the stream, and tell all that wait why."""
        call.cancel()
        self._call, self._per_request = None, 1
        lost, self._waiting = self._waiting, deque()
        is_final = isinstance(ended, RefusedError) and not ended.reason.is_retryable
        if is_final and len(lost) == 1:
            self._singly = 0
        elif is_final:
            self._singly = 2 * len(lost)
            ended = ConnectionLost(f"one of {len(lost)} groups, or their sender, was refused: {ended}")
        for answer in lost:
            _fail(answer, ended)


async def _write_to(
    call: "_Call", request: rollout_pb2.SubmitRolloutsRequest, *, reader: "asyncio.Task[None]"
) -> None:
    """Write a request, unless the stream ends before: its reader then has told those that wait.

    To a call that is cancelled while it has no connection, gRPC would write for ever.
    """
    writing: asyncio.Future[Any] = asyncio.ensure_future(call.write(request))
    try:
        await asyncio.wait((writing, reader), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not writing.done():  # what is not known to be written must not be answered on this stream
            call.cancel()
        drop(writing)


def _fail(answer: "asyncio.Future[Answer]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _settle(answer: "asyncio.Future[Answer]", found: rollout_pb2.SubmissionAnswer) -> None:
    if answer.done():  # its caller has gone
        return
    try:
        if found.reason:
            if found.reason not in set(Reason):  # as in ``classify``: a later version's is tried again
                raise ConnectionLost(f"refused as {found.reason[:50]!r}: {found.detail}")
            raise RefusedError(member_from_wire(Reason, found, "reason"), found.detail, is_remote=True)
        answer.set_result((member_from_wire(Verdict, found, "verdict"), found.detail))
    except (RefusedError, ConnectionLost) as error:
        answer.set_exception(error)
