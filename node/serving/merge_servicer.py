"""MergeService as a learner serves it: one task listens to a contributor while another tells it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol, TypeAlias

from heterorl.v1 import merge_pb2, merge_pb2_grpc
from node.errors import Reason, RefusedError
from node.rpc.calls.caller import Context, peer_of
from node.system.waits import put_away
from node.values.contribution import ContributionAnswer, MergeTerms
from node.values.groups.rollout import EncodedGroup
from node.values.merging import ContributionHead, ContributorHello, GroupsTaken
from node.wire.mapping import from_wire, to_wire
from node.wire.rollouts import delivery_to_wire

Told: TypeAlias = MergeTerms | EncodedGroup | ContributionAnswer | GroupsTaken
Heard: TypeAlias = int | ContributionHead | bytes
"""Credits, a contribution that begins, the next part of its payload."""


add_to_server = merge_pb2_grpc.add_MergeServiceServicer_to_server


class Stream(Protocol):
    """One contributor's stream."""

    @property
    def is_ended(self) -> bool: ...

    def end(self) -> None:
        """End it."""
        ...

    def responses(self) -> AsyncGenerator[Told, None]:
        """Yield everything to be told, until the end. Raises RefusedError: it ended with one."""
        ...


class MergeDesk(Protocol):
    """The learner's account of its contributors."""

    def open(self, name: str, hello: ContributorHello) -> Stream:
        """Begin a contributor's newest stream. Raises RefusedError: why it may not."""
        ...

    def hear(self, name: str, heard: Heard) -> None:
        """Take a message of a contributor's newest stream. Raises RefusedError: the stream is to end."""
        ...

    def close(self, name: str, stream: Stream) -> None:
        """Note that a stream has ended."""
        ...


class MergeServicer(merge_pb2_grpc.MergeServiceServicer):
    def __init__(self, desk: MergeDesk) -> None:
        self._desk = desk

    async def Contribute(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[merge_pb2.ContributeRequest], context: Context
    ) -> AsyncIterator[merge_pb2.ContributeResponse]:
        """Deal groups to a contributor, and take the contributions that it makes of them."""
        first, name = await anext(request_iterator, None), peer_of(context).node_id
        if first is None or not first.HasField("hello"):
            raise RefusedError(Reason.MALFORMED, "the stream does not begin with a hello")
        hello = first.hello
        held = tuple(hello.held_group_ids)
        stream = self._desk.open(name, ContributorHello(hello.layout_digest, hello.base_root, held))
        listener = asyncio.create_task(self._listen(request_iterator, name, stream))
        listener.add_done_callback(lambda _: stream.end())
        try:
            async with aclosing(stream.responses()) as responses:
                async for told in responses:
                    yield _to_wire(told)
        finally:
            self._desk.close(name, stream)
            await put_away(listener)
        if not listener.cancelled():
            listener.result()

    async def _listen(
        self, requests: AsyncIterator[merge_pb2.ContributeRequest], name: str, stream: Stream
    ) -> None:
        async for request in requests:
            if stream.is_ended:
                return
            self._desk.hear(name, _heard(request))


def _heard(request: merge_pb2.ContributeRequest) -> Heard:
    match request.WhichOneof("message"):
        case "credit":
            return request.credit.groups
        case "contribution":
            return from_wire(ContributionHead, request.contribution)
        case "payload":
            return request.payload
        case kind:
            raise RefusedError(
                Reason.MALFORMED, f"a contributor's stream takes no {kind or 'empty message'} here"
            )


def _to_wire(told: Told) -> merge_pb2.ContributeResponse:
    match told:
        case MergeTerms():
            return merge_pb2.ContributeResponse(terms=to_wire(merge_pb2.MergeTerms, told))
        case EncodedGroup():
            return merge_pb2.ContributeResponse(group=delivery_to_wire(told).group)
        case ContributionAnswer():
            return merge_pb2.ContributeResponse(answer=to_wire(merge_pb2.ContributionAnswer, told))
        case GroupsTaken():
            return merge_pb2.ContributeResponse(taken=to_wire(merge_pb2.GroupsTaken, told))
