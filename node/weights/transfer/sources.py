"""The hubs and relays a peer takes policy versions from, with their buckets: connections, and announcements.

One watch per source, each reconnecting for ever. ``SourceTurns`` merges what they announce, and decides
whose turn it is and who is set aside.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import grpc.aio

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.errors import RefusedError
from node.rpc.address import is_loopback, split_target, split_targets
from node.rpc.call_ends import ConnectionLost, classified
from node.rpc.channel import Caller, Purpose, dial
from node.rpc.hub import Hub
from node.system.backoff import Backoff
from node.system.clock import Clock
from node.system.waits import wait_at_most
from node.telemetry.transfer_metrics import TransferMetrics
from node.values import limits
from node.values.policy import Announcement, ArtifactKey
from node.values.roles import Role
from node.weights.format.manifest import Manifest
from node.weights.transfer.bucket_reader import CONNECTIONS as BUCKET_CONNECTIONS
from node.weights.transfer.bucket_reader import BucketReader
from node.weights.transfer.ranges import ChunkStream
from node.weights.transfer.source_turns import Fault, SourceTurns, bucket_of
from node.wire.mapping import from_wire

logger = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 1.0
"""How late the end of a term may be noticed; far below any term."""


ReadChunk: TypeAlias = Callable[[], Awaitable[Any]]
"""Returns the next message of a ChunkStream; something else at its end."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    address: str
    """Also its name, for people and among sources. A hub of several coordinators has all of theirs."""
    control: grpc.aio.Channel
    """Announcements never wait behind weights."""
    bulk: tuple[grpc.aio.Channel, ...]
    """At least one; more connections carry more over a long link. Connected before there is anything to
    fetch, except for the last resort's."""
    hub: Hub | None = None
    """Moved on where the coordinator that it is at does not serve. None: membership moves it."""


@dataclass(slots=True)
class _Connection:
    stub: "policy_pb2_grpc.PolicyServiceAsyncStub"
    lanes: int = 0


def dial_source(
    address: str | Hub,
    caller: Caller,
    *,
    connections: int,
    now: float,
    control: grpc.aio.Channel | None = None,
    server: Role = Role.COORDINATOR,
) -> Source:
    """Return a source with so many bulk ``connections``, connected to at its first call.

    Args:
        control: Whose ``Hub`` membership moves on. None: the source has a channel, and moves the hub, itself.
        server: Role of who is to answer there.
    Raises as ``dial``.
    """
    bulk = (dial(address, caller, purpose=Purpose.BULK, now=now, server=server) for _ in range(connections))
    return Source(
        str(address),
        control or dial(address, caller, purpose=Purpose.CONTROL, now=now, server=server),
        tuple(bulk),
        hub=address if isinstance(address, Hub) and control is None else None,
    )


class Sources:
    """All sources a peer may ask for weights. Used on the event loop's thread."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        last_resort: Source | None = None,
        clock: Clock,
        random: Callable[[], float],
        metrics: TransferMetrics,
    ) -> None:
        """Ask ``sources``, at least one; ``last_resort`` only once they have all been behind it for long."""
        everyone = [*sources, *([] if last_resort is None else [last_resort])]
        self._sources = {source.address: source for source in everyone}
        self.turns = SourceTurns(
            [source.address for source in sources],
            last_resort=None if last_resort is None else last_resort.address,
        )
        """State of every source: whom to believe and to ask."""
        self._connections = {
            source.address: [
                _Connection(policy_pb2_grpc.PolicyServiceStub(channel)) for channel in source.bulk
            ]
            for source in everyone
        }
        # Connected before there is anything to fetch: that takes three round trips.
        self._first_asked = [channel for source in sources for channel in source.bulk]
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._changed = asyncio.Event()
        self._buckets = {bucket_of(source.address): self._bucket_of(source) for source in everyone}
        self._warned_of_buckets = False

    def __len__(self) -> int:
        return len(self._sources)

    async def announcements(self) -> AsyncGenerator[Announcement, None]:
        """Yield what can be had from all sources together, at each change, for as long as anyone listens.

        Raises RefusedError: no source will ever announce anything to this peer.
        """
        for channel in self._first_asked:
            channel.get_state(try_to_connect=True)
        watches = [asyncio.create_task(self._watch(source)) for source in self._sources.values()]
        told: Announcement | None = None
        try:
            while True:
                self._changed.clear()
                announcement = self.turns.announcement(self._clock.monotonic())
                if announcement is not None and announcement != told:
                    told = announcement
                    yield announcement
                    continue
                if all(watch.done() for watch in watches):
                    watches[0].result()
                await wait_at_most(self._changed, LOOK_AGAIN_S)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            for bucket in self._buckets.values():
                await bucket.close()

    def candidates(self, key: ArtifactKey) -> tuple[str, ...]:
        """Return the addresses to ask for an artifact; none: no source has it any more."""
        return self.turns.candidates(key, now=self._clock.monotonic())

    def readable(self, key: ArtifactKey) -> tuple[str, ...]:
        """Return whom to read an artifact's frames from: hubs, or their buckets."""
        return self.turns.readable(key, now=self._clock.monotonic())

    def is_standing(self, name: str) -> bool:
        """Return whether a source is not set aside."""
        return self.turns.is_standing(name, now=self._clock.monotonic())

    def is_bucket(self, name: str) -> bool:
        return name in self._buckets

    def preferred(self) -> "tuple[str, policy_pb2_grpc.PolicyServiceAsyncStub]":
        """Return whom to ask for what no source has yet, on the connection that TCP has measured by now."""
        name = self.turns.next_of(self.turns.standing(now=self._clock.monotonic()))
        return name, self._connections[name][0].stub

    def push_bytes(self, name: str) -> int:
        """Return how many payload bytes a hub is to send without a request."""
        has_bucket = self.turns.has_bucket(name, now=self._clock.monotonic())
        return limits.DIRECT_BYTES if has_bucket else limits.PUSH_BYTES

    def connections(self, names: Iterable[str]) -> int:
        return sum(len(self._connections.get(name, ())) or BUCKET_CONNECTIONS for name in names)

    @asynccontextmanager
    async def chunks(
        self,
        name: str,
        request: policy_pb2.FetchFramesRequest,
        manifest: Manifest,
        *,
        pushed: ChunkStream | None,
    ) -> AsyncIterator[ReadChunk]:
        """Read frames from a hub or a bucket while the body runs; ``pushed``: a hub sends them already."""
        if (bucket := self._buckets.get(name)) is not None:
            self.turns.take_lane(name)
            try:
                async with aclosing(bucket.chunks(request, manifest)) as chunks:
                    yield lambda: anext(chunks, None)
            finally:
                self.turns.leave_lane(name)
            return
        with self.lane(name) as stub:
            stream: ChunkStream = pushed or stub.FetchFrames(request)
            try:
                yield stream.read
            finally:
                stream.cancel()

    @contextmanager
    def lane(self, name: str) -> "Iterator[policy_pb2_grpc.PolicyServiceAsyncStub]":
        """Return a stub on a source's least busy connection, and count a lane on it for the time of the body.

        Of equally busy connections the first: small fetches stay on a few warm connections.
        """
        connection = min(self._connections[name], key=lambda connection: connection.lanes)
        connection.lanes += 1
        self.turns.take_lane(name)
        try:
            yield connection.stub
        finally:
            connection.lanes -= 1
            self.turns.leave_lane(name)

    def lacks(self, name: str, key: ArtifactKey) -> None:
        self.turns.lacks(name, key)
        self._changed.set()

    def signed(self, manifest: Manifest) -> None:
        """Record a verified manifest; set aside every source that announced something else."""
        for name in self.turns.signed(manifest):
            self.fault(
                name, Fault.LIED, f"announced another root or size than signed for version {manifest.version}"
            )

    def fault(self, name: str, fault: Fault, what: str) -> None:
        """Set a source aside, and count it."""
        self.turns.fault(name, fault, now=self._clock.monotonic())
        self._metrics.count_source_fault(fault.value)
        level = logging.DEBUG if fault is Fault.LOST else logging.WARNING
        logger.log(level, "source set aside", extra={"source": name, "fault": fault.value, "detail": what})
        self._changed.set()

    async def _watch(self, source: Source) -> None:
        def lost(error: ConnectionLost | RefusedError | None = None) -> None:
            self.turns.lost(source.address)
            if source.hub is not None and error is not None:
                source.hub.move_on_after(error)
            self._changed.set()

        try:
            async for announcement in watch_versions(source.control, random=self._random, lost=lost):
                if not self.turns.heard(source.address, self._with_bucket_if_possible(announcement)):
                    self.fault(source.address, Fault.LIED, "announced another root or size than was signed")
                self._changed.set()
        finally:
            lost()

    def _bucket_of(self, source: Source) -> BucketReader:
        return BucketReader(
            policy_pb2_grpc.PolicyServiceStub(source.control),
            takes_http=all(is_loopback(split_target(each)[0]) for each in split_targets(source.address)),
            metrics=self._metrics,
            monotonic=self._clock.monotonic,
        )

    def _with_bucket_if_possible(self, announcement: Announcement) -> Announcement:
        if not announcement.in_bucket or BucketReader.is_possible():
            return announcement
        if not self._warned_of_buckets:
            self._warned_of_buckets = True
            fix = "pip install 'heterorl-node[objects]'"
            logger.warning("a bucket is not used: httpx is not installed", extra={"fix": fix})
        return replace(announcement, in_bucket=())


async def watch_versions(
    channel: grpc.aio.Channel,
    *,
    random: Callable[[], float],
    lost: Callable[[ConnectionLost | RefusedError | None], None] = lambda _: None,
) -> AsyncGenerator[Announcement, None]:
    """Yield every announcement, the newest at once; reconnect for ever.

    Announcements are not signed: they say what to ask for, and its signed manifest is then verified. They
    come over a control channel, so that none waits behind weights; ``lost`` is called when it is cut, with
    the error if there is one.

    Raises RefusedError: for a reason that is not retryable.
    """
    stub = policy_pb2_grpc.PolicyServiceStub(channel)
    backoff = Backoff(random)
    while True:
        why: ConnectionLost | RefusedError | None = None
        call = stub.WatchVersions(policy_pb2.WatchVersionsRequest())
        try:
            with classified():
                async for message in call:
                    backoff.reset()
                    yield from_wire(Announcement, message)
        except ConnectionLost as error:
            why = error
            logger.debug("the announcements were cut", extra={"error": str(error)})
        except RefusedError as error:
            if not error.reason.is_retryable:
                raise
            why = error
            logger.info("the hub does not announce now", extra={"reason": error.reason, "error": str(error)})
        finally:
            call.cancel()
        lost(why)
        await backoff.wait()
