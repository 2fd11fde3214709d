"""MergeService as a learner serves it: one task listens to a contributor while another tells it.

A contribution comes in parts, which are put together here; its sender is the stream's.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Final, Protocol

from heterorl.v1 import merge_pb2, merge_pb2_grpc
from node.errors import Reason, RefusedError
from node.identity.revocation import RevocationList
from node.rpc.calls.caller import Context, peer_of
from node.system.waits import put_away
from node.values.contribution import Contribution, ContributorHello, ToContributor
from node.wire.contributions import told_to_wire
from node.wire.mapping import from_wire

add_to_server = merge_pb2_grpc.add_MergeServiceServicer_to_server

HELD_IDS: Final = 65_536

Requests = AsyncIterator[merge_pb2.ContributeRequest]


MOST_UNTOLD: Final = 1 << 16
"""Messages that wait for a contributor: groups within its credits, and answers."""


class ContributorStream:
    """Messages to one contributor, until its stream ends."""

    def __init__(self) -> None:
        self._untold: deque[ToContributor] = deque()
        """Groups are bounded by credits, all else by contributions."""
        self._changed = asyncio.Event()
        self._refusal: RefusedError | None = None
        self.is_ended = False

    def tell(self, *told: ToContributor) -> None:
        """Send messages after those before; ends the stream of one that does not read them."""
        self._untold += told
        self._changed.set()
        if len(self._untold) > MOST_UNTOLD:
            self.end(RefusedError(Reason.OVER_LIMIT, f"{MOST_UNTOLD} messages were not read"))

    def end(self, refusal: RefusedError | None = None) -> None:
        """End the stream, with a refusal if there is one."""
        if not self.is_ended:
            self.is_ended, self._refusal = True, refusal
            self._changed.set()

    async def all_told(self) -> AsyncGenerator[ToContributor, None]:
        """Yield what is to be sent, until the end. Raises RefusedError: it ended with one."""
        while not self.is_ended:
            if self._untold:
                yield self._untold.popleft()
            else:
                self._changed.clear()
                await self._changed.wait()
        if self._refusal is not None:
            raise self._refusal


class MergeDesk(Protocol):
    """The learner's account of its contributors."""

    def open(self, name: str, stream: ContributorStream, held_group_ids: tuple[str, ...]) -> None:
        """Begin a contributor's newest stream; an older one ends. Raises RefusedError: why it may not."""

    def credit(self, name: str, groups: int) -> None:
        """Note that a contributor has room for more groups."""

    def is_new(self, name: str, head: Contribution, *, payload_bytes: int) -> bool:
        """Whether a contribution that begins, here without its payload, is to be read; else it is known.

        Raises:
            RefusedError: the stream is to end. OVER_LIMIT; MALFORMED: its number was another's; BUSY.
        """

    def hand_in(self, name: str, contribution: Contribution) -> None:
        """Take a new contribution that has come whole."""

    def close(self, name: str, stream: ContributorStream) -> None:
        """Note that a stream has ended."""

    @property
    def version_groups(self) -> int:
        """Groups that a version consumes, with the contributors that are there."""


class MergeServicer(merge_pb2_grpc.MergeServiceServicer):
    def __init__(
        self, base_root: bytes, layout_digest: bytes, revocations: RevocationList | None = None
    ) -> None:
        """Serve contributors of one model.

        Args:
            revocations: who is shut out; None: nobody.
        """
        self._base_root = base_root
        self._layout_digest = layout_digest
        self.revocations = RevocationList() if revocations is None else revocations
        self.desk: MergeDesk | None = None
        """None: the learner is starting."""

    @property
    def version_groups(self) -> int:
        """As of the desk; 0: nothing is dealt yet."""
        return 0 if self.desk is None else self.desk.version_groups

    async def Contribute(  # noqa: N802 - the rpc's name
        self, request_iterator: Requests, context: Context
    ) -> AsyncIterator[merge_pb2.ContributeResponse]:
        """Deal groups to a contributor, and take the contributions that it makes of them."""
        first, name = await anext(request_iterator, None), peer_of(context).node_id
        if first is None or not first.HasField("hello"):
            raise RefusedError(Reason.MALFORMED, "the stream does not begin with a hello")
        if (desk := self.desk) is None:
            raise RefusedError(Reason.BUSY, "the learner is starting", fix="connect again later")
        hello = from_wire(ContributorHello, first.hello)
        self._check(hello)
        stream = ContributorStream()
        desk.open(name, stream, hello.held_group_ids)
        listener = asyncio.create_task(_listen(request_iterator, desk, name, stream))
        listener.add_done_callback(lambda _: stream.end())
        try:
            async with aclosing(stream.all_told()) as all_told:
                async for told in all_told:
                    yield told_to_wire(told)
        finally:
            desk.close(name, stream)
            await put_away(listener)
        if not listener.cancelled():
            listener.result()

    def _check(self, hello: ContributorHello) -> None:
        if hello.layout_digest != self._layout_digest:
            raise RefusedError(
                Reason.LAYOUT_MISMATCH,
                f"this contributor's layout digest is {hello.layout_digest.hex() or 'empty'}, the run's is "
                f"{self._layout_digest.hex()}",
                fix="give every peer the same model directory",
            )
        if hello.base_root != self._base_root:
            raise RefusedError(
                Reason.BASE_MISMATCH,
                f"version 0 of this contributor has root {hello.base_root.hex() or 'unknown'}, the run's has "
                f"{self._base_root.hex()}",
                fix="give this contributor the model directory that the learner began with",
            )
        if len(hello.held_group_ids) > HELD_IDS:
            raise RefusedError(Reason.OVER_LIMIT, f"more than {HELD_IDS} held groups")


async def _listen(requests: Requests, desk: MergeDesk, name: str, stream: ContributorStream) -> None:
    async for request in requests:
        if stream.is_ended:
            return
        match request.WhichOneof("message"):
            case "credit":
                desk.credit(name, request.credit.groups)
            case "contribution":
                header = request.contribution
                head = from_wire(Contribution, header, payload=b"")
                is_new = desk.is_new(name, head, payload_bytes=header.payload_bytes)
                payload = await _payload(requests, header.payload_bytes, is_kept=is_new)
                if payload is not None and not stream.is_ended:
                    desk.hand_in(name, replace(head, payload=payload))
            case kind:
                raise RefusedError(
                    Reason.MALFORMED, f"a contributor's stream takes no {kind or 'empty message'} here"
                )


async def _payload(requests: Requests, size: int, *, is_kept: bool) -> bytes | None:
    """Read and return a payload of ``size`` bytes; None: it is not to be kept, or the stream ended within it.

    Raises:
        RefusedError: MALFORMED; something else comes, or more.
    """
    parts: list[bytes] = []
    while size > 0:
        if (request := await anext(requests, None)) is None:
            return None
        part = request.payload
        size -= len(part)
        if not part or size < 0:
            raise RefusedError(Reason.MALFORMED, "the parts of a payload are not those of its header")
        if is_kept:
            parts.append(part)
    # In a thread: a copy of some hundred MiB takes longer than the event loop may.
    return await asyncio.to_thread(b"".join, parts) if is_kept else None
