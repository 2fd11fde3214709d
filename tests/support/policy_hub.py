"""A real hub of policy versions over mutual TLS, and the peers that talk to it."""

import asyncio
import enum
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.identity.identity_store import Identity
from node.rpc.channel import Purpose, dial
from node.serving.policy_servicer import PolicyServicer
from node.system.clock import SystemClock
from node.system.waits import side_by_side
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.policy import ArtifactKey
from node.weights.format.layout import Layout
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.bucket import Bucket
from node.weights.transfer.bucket_mirror import BucketMirror
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.lane import FetchLimits
from node.weights.transfer.sources import Source, Sources
from support.clock import ManualClock
from support.identity import MadeRun
from support.rpc import Serving, serving
from support.weights import LAYOUT, Learner

Answers = AsyncGenerator[policy_pb2.FetchFramesResponse, None]
Pushes = AsyncIterator[policy_pb2.AwaitArtifactResponse]


class Registry:
    """A registry with the transfer metrics on it, and what they count."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = TransferMetrics(self.registry)

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def transferred(self, kind: str, direction: str) -> float:
        return self.value("heterorl_node_transfer_bytes_total", kind=kind, direction=direction)


class Pushing(enum.Enum):
    """A hub's reaction to a request for an artifact in advance."""

    UNKNOWN = enum.auto()
    """It does not know the rpc: whoever asks fetches at once."""
    SILENT = enum.auto()
    """It never answers: whoever asks loses its patience first, a second a version."""
    PUSHES = enum.auto()


class WatchedServicer(PolicyServicer):
    """Remembers what was asked and sent, and lets a test spoil the answers.

    Each frame travels alone. Asked in advance, it answers as ``pushes`` says.
    """

    def __init__(self, store: ArtifactStore, **options: Any) -> None:
        super().__init__(store, batch_bytes=0, **options)
        self.damage: Callable[[bytes], bytes] = lambda payload: payload
        self.pushes = Pushing.UNKNOWN
        self.awaited: list[int] = []
        """Version held by whoever asked for the next artifact, at each request."""
        self.spoil_push: Callable[[Pushes], Pushes] = lambda answers: answers
        self.fetches: list[policy_pb2.FetchFramesRequest] = []
        self.uploaded: list[int] = []
        """Frame of every chunk that came in."""
        self.spoil: Callable[[int, Answers], Answers] = lambda number, answers: answers
        """(number of the request, good answers) -> what is sent instead."""
        self.announced_instead: Callable[[policy_pb2.WatchVersionsResponse], None] = lambda announcement: None
        """Changes each announcement before it is sent."""

    async def WatchVersions(  # noqa: N802
        self, request: policy_pb2.WatchVersionsRequest, context: Any
    ) -> AsyncIterator[policy_pb2.WatchVersionsResponse]:
        async for announcement in super().WatchVersions(request, context):
            self.announced_instead(announcement)
            yield announcement

    async def FetchFrames(  # noqa: N802
        self, request: policy_pb2.FetchFramesRequest, context: Any
    ) -> Answers:
        self.fetches.append(request)
        async for answer in self.spoil(len(self.fetches), super().FetchFrames(request, context)):
            yield answer

    def read(self, key: ArtifactKey, frames: Sequence[int], *, verifies: bool) -> bytes:
        return self.damage(super().read(key, frames, verifies=verifies))

    async def AwaitArtifact(  # noqa: N802
        self, request: policy_pb2.AwaitArtifactRequest, context: Any
    ) -> Pushes:
        self.awaited.append(request.held_version)
        match self.pushes:
            case Pushing.UNKNOWN:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED)
            case Pushing.SILENT:
                await asyncio.Event().wait()
        async for answer in self.spoil_push(super().AwaitArtifact(request, context)):
            yield answer

    async def UploadFrames(  # noqa: N802
        self, request: AsyncIterator[policy_pb2.UploadFramesRequest], context: Any
    ) -> policy_pb2.UploadFramesResponse:
        async def watched() -> AsyncIterator[policy_pb2.UploadFramesRequest]:
            async for message in request:
                self.uploaded.append(message.frame)
                yield message

        return await super().UploadFrames(watched(), context)


@dataclass(slots=True)
class PolicyHub:
    """A hub that runs, its store, its servicer, and the learner of its run."""

    made: MadeRun
    store: ArtifactStore
    servicer: WatchedServicer
    serving: Serving
    learner: Learner
    registry: Registry
    bucket: BucketMirror | None
    """The service that fills the hub's bucket, where there is one."""
    clock: ManualClock
    """By which what was asked for lingers in the store."""
    _channels: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def dial(self, identity: Identity, *, purpose: Purpose = Purpose.BULK) -> grpc.aio.Channel:
        """Return a channel that is closed with the hub."""
        return await self.own(dial(self.serving.address, identity, purpose=purpose, now=self.made.made_at_s))

    async def own(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """Close a channel with the hub."""
        return await self._channels.enter_async_context(channel)

    async def source(self, *, channels: int = 1) -> Source:
        """Return this hub as a sampler's source."""
        bulk = [await self.dial(self.made.sampler) for _ in range(channels)]
        control = await self.dial(self.made.sampler, purpose=Purpose.CONTROL)
        return Source(self.serving.address, control, tuple(bulk))

    async def fetcher(self, registry: Registry, *, channels: int = 1, **limits: Any) -> Fetcher:
        """Return a sampler's fetcher; its backoff takes no time."""
        return make_fetcher(
            self.made, make_sources(registry, await self.source(channels=channels)), registry, **limits
        )

    async def close(self) -> None:
        await self._channels.aclose()


def make_sources(registry: Registry, *sources: Source, last_resort: Source | None = None) -> Sources:
    """Return sources whose watches reconnect at once."""
    return Sources(
        sources, last_resort=last_resort, clock=SystemClock(), random=lambda: 0.01, metrics=registry.metrics
    )


def make_fetcher(made: MadeRun, sources: Sources, registry: Registry, **limits: Any) -> Fetcher:
    """Return a sampler's fetcher; its backoff takes no time."""
    return Fetcher(
        sources,
        public_key=made.run.learner_public_key,
        run_id=made.run_id,
        metrics=registry.metrics,
        random=lambda: 0.0,
        limits=FetchLimits(**({"least_range_bytes": 1} | limits)),
    )


def make_bucket_mirror(
    store: ArtifactStore, bucket: Bucket, registry: Registry, hold_s: Callable[[int], float]
) -> BucketMirror:
    """Return the service that fills a bucket; it looks often, and its backoff takes no time."""
    return BucketMirror(
        store,
        bucket,
        metrics=registry.metrics,
        monotonic=time.monotonic,
        random=lambda: 0.01,
        look_again_s=0.2,
        hold_s=hold_s,
    )


@asynccontextmanager
async def policy_hub(
    made: MadeRun,
    directory: Path,
    *,
    layout: Layout = LAYOUT,
    learner: Learner | None = None,
    listen: str = "127.0.0.1:0",
    bucket: Bucket | None = None,
    hold_s: Callable[[int], float] = lambda size_bytes: 60.0,
) -> AsyncIterator[PolicyHub]:
    """Serve the store in ``directory``, and fill ``bucket``, until the body ends."""
    learner = learner or Learner(layout=layout, run_id=made.run_id, key=made.signing_key)
    clock = ManualClock()
    store = learner.store(directory, monotonic=clock.monotonic)
    registry = Registry()
    mirror = None if bucket is None else make_bucket_mirror(store, bucket, registry, hold_s)
    servicer = WatchedServicer(store, metrics=registry.metrics, bucket=mirror)
    add = partial(policy_pb2_grpc.add_PolicyServiceServicer_to_server, servicer)
    async with serving(made, add, listen=listen) as served:
        hub = PolicyHub(made, store, servicer, served, learner, registry, mirror, clock)
        async with side_by_side() as tasks:
            stopping = asyncio.Event()
            if mirror is not None:
                tasks.create_task(mirror.run(ready=lambda: None, stopping=stopping))
            try:
                yield hub
            finally:
                stopping.set()
                await hub.close()


def policy_hub_fixture(layout: Layout = LAYOUT) -> Callable[..., AsyncIterator[PolicyHub]]:
    """Return a fixture, a hub of versions, for a module of tests to give a name.

    A test may ask for a layout of its own: ``parametrize(NAME, [LAYOUT], indirect=True)``.
    """

    @pytest.fixture
    async def hub(made: MadeRun, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[PolicyHub]:
        async with policy_hub(made, tmp_path / "hub", layout=getattr(request, "param", layout)) as hub:
            yield hub

    return hub
