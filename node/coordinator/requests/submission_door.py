"""Groups as they come in at a hub: read as far as there is room, checked, answered in order.

stream --room in bytes--> size, whose it is --take--> on disk --.
   |          full: the stream is not read any further                  |
   '<-- answers, in the groups' order: a verdict, or a refusal <--------'
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

from heterorl.v1 import rollout_pb2
from node.coordinator.work.decisions.submitted_groups import Submitted
from node.errors import CountRefusal, Reason, RefusedError
from node.identity.peer import Peer
from node.system.byte_room import ByteRoom
from node.system.waits import put_away
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.groups.rollout import EncodedGroup
from node.values.limits import GROUPS_PER_REQUEST
from node.wire.mapping import verdict_to_wire
from node.wire.rollouts import submitted_from_wire

logger = logging.getLogger(__name__)

IN_FLIGHT_BYTES: Final = 256 << 20
"""Groups that may be between socket and disk at once; senders keep the others. A slow disk takes two seconds
for so much."""

STREAM_GROUPS: Final = 64
"""Groups of one stream at once: as many as a sampler has in flight."""

STREAMS_PER_CALLER: Final = 2
"""One, and one that is not known yet to have been cut."""

_DETAIL_CHARACTERS: Final = 1000


Take: TypeAlias = Callable[[EncodedGroup], Awaitable[Submitted]]
"""Puts a group on disk, or says why not. Raises RefusedError, or what it returns does."""


class SubmissionDoor:
    """Admits submissions at a hub; used on the event loop's thread."""

    def __init__(
        self,
        *,
        count_refusal: CountRefusal,
        metrics: TransferMetrics,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
    ) -> None:
        self._count_refusal = count_refusal
        self._metrics = metrics
        self._room = ByteRoom(in_flight_bytes)
        self._streams: Counter[str] = Counter()
        metrics.watch_submissions(lambda: self._room.used_bytes)

    async def answers(
        self,
        requests: AsyncIterator[rollout_pb2.SubmitRolloutsRequest | RefusedError],
        caller: Peer,
        take: Take,
        *,
        group_bytes: int,
    ) -> AsyncGenerator[rollout_pb2.SubmitRolloutsResponse]:
        """Answer a stream's groups, several at once, in their order; those that are ready go together.

        Args:
            group_bytes: Size of the largest group of the run.
        Raises:
            RefusedError: BUSY; the caller has too many streams. What is wrong with a request is its answer.
        """
        if self._streams[caller.node_id] >= STREAMS_PER_CALLER:
            what = f"{caller.node_id} submits on {STREAMS_PER_CALLER} streams already"
            raise RefusedError(Reason.BUSY, what, fix="end one first")
        pending: deque[asyncio.Future[Submitted]] = deque()
        places, changed = asyncio.Semaphore(STREAM_GROUPS), asyncio.Event()

        async def read() -> None:
            await places.acquire()
            async for request in requests:
                groups = _groups_in(request)
                del request
                while groups:
                    group = groups.popleft()
                    size_bytes = _held_bytes(group)
                    await self._room.take(size_bytes)
                    taken = self._taken(group, caller, take, group_bytes=group_bytes)
                    taken.add_done_callback(partial(leave, size_bytes))
                    pending.append(taken)
                    del group, taken
                    await places.acquire()

        def leave(size_bytes: int, _: object) -> None:
            self._room.give_back(size_bytes)
            changed.set()

        self._streams[caller.node_id] += 1
        reader = asyncio.create_task(read())
        reader.add_done_callback(lambda _: changed.set())
        try:
            while pending or not reader.done():
                if not (pending and pending[0].done()):
                    await changed.wait()
                    changed.clear()
                    continue
                response = rollout_pb2.SubmitRolloutsResponse(groups_per_request=GROUPS_PER_REQUEST)
                while pending and pending[0].done():
                    response.answers.append(self._answer(pending.popleft(), caller))
                    places.release()
                yield response
            reader.result()
        finally:
            self._streams -= Counter({caller.node_id: 1})
            await put_away(reader, *pending)

    def _taken(
        self, group: EncodedGroup | RefusedError, caller: Peer, take: Take, *, group_bytes: int
    ) -> "asyncio.Future[Submitted]":
        """Return what becomes of a group: a task only where ``take`` returns a coroutine."""
        try:
            if isinstance(group, RefusedError):
                raise group
            return asyncio.ensure_future(take(self._checked(group, caller, group_bytes=group_bytes)))
        except RefusedError as refused:
            at_once: asyncio.Future[Submitted] = asyncio.get_running_loop().create_future()
            at_once.set_exception(refused)
            return at_once

    def _answer(self, taken: "asyncio.Future[Submitted]", caller: Peer) -> rollout_pb2.SubmissionAnswer:
        try:
            submitted = taken.result()
        except RefusedError as refused:
            self._count_refusal(service="RolloutService", reason=refused.reason)
            said = str(refused)
            logger.debug("submission refused", extra={"peer": caller.node_id, "detail": said})
            return rollout_pb2.SubmissionAnswer(detail=said[:_DETAIL_CHARACTERS], reason=refused.reason.value)
        return rollout_pb2.SubmissionAnswer(
            verdict=verdict_to_wire(submitted.verdict), detail=submitted.detail[:_DETAIL_CHARACTERS]
        )

    def _checked(self, group: EncodedGroup, caller: Peer, *, group_bytes: int) -> EncodedGroup:
        """Return a group as its sampler's: the caller's, as its connection proves.

        Raises RefusedError: OVER_LIMIT; WRONG_ROLE, if the caller names another peer.
        """
        size_bytes = group.size_bytes
        self._metrics.count_rollouts(received_bytes=size_bytes)
        if size_bytes > group_bytes:
            raise RefusedError(
                Reason.OVER_LIMIT, f"a group of {size_bytes} bytes, the largest of this run has {group_bytes}"
            )
        if group.sampler_id:
            raise RefusedError(
                Reason.WRONG_ROLE,
                f"{caller.node_id} submits for itself, and names {group.sampler_id[:100]!r}",
            )
        return group.made_by(caller.node_id)


def _groups_in(
    request: rollout_pb2.SubmitRolloutsRequest | RefusedError,
) -> deque[EncodedGroup | RefusedError]:
    return deque([request] if isinstance(request, RefusedError) else submitted_from_wire(request))


def _held_bytes(group: EncodedGroup | RefusedError) -> int:
    """Return what a group takes in memory, whatever its sender put where."""
    if isinstance(group, RefusedError):
        return 0
    return group.size_bytes + len(group.group_id) + len(group.sampler_id)
