"""MergeService as the learner serves it: one task listens to a contributor while another tells it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from heterorl.v1 import merge_pb2, merge_pb2_grpc
from learner.merging.contributor_streams import ContributorStream, ContributorStreams
from node.errors import Reason, RefusedError
from node.rpc.calls.caller import Context, peer_of
from node.system.waits import put_away


class MergeServicer(merge_pb2_grpc.MergeServiceServicer):
    def __init__(self, streams: ContributorStreams) -> None:
        self._streams = streams

    async def Contribute(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[merge_pb2.ContributeRequest], context: Context
    ) -> AsyncIterator[merge_pb2.ContributeResponse]:
        """Deal groups to a contributor, and take what it makes of them."""
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            raise RefusedError(Reason.MALFORMED, "the stream does not begin with a hello")
        stream = self._streams.open(peer_of(context).node_id, first.hello)
        listener = asyncio.create_task(self._listen(request_iterator, stream))
        listener.add_done_callback(lambda _: stream.end())
        try:
            async with aclosing(stream.responses()) as responses:
                async for response in responses:
                    yield response
        finally:
            self._streams.close(stream)
            await put_away(listener)
        if not listener.cancelled():
            listener.result()

    async def _listen(
        self, requests: AsyncIterator[merge_pb2.ContributeRequest], stream: ContributorStream
    ) -> None:
        async for request in requests:
            if stream.is_ended:
                return
            self._streams.hear(stream, request)
