"""A publisher in the background of a test, and what a peer that fetches everything ends up with."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from bench.held_policy import HeldPolicy
from learner.masters.master_access import MasterAccess
from learner.masters.master_words import MasterWords
from learner.masters.version_coder import LocalCoder
from learner.metrics import Instruments
from learner.publishing.further_artifacts import FurtherArtifacts
from learner.publishing.publisher import Publisher
from learner.publishing.signer import Signer
from node.identity.signatures import SigningKey
from node.system.clock import SystemClock
from node.telemetry.metrics import NodeMetrics
from node.values.policy import ArtifactKey, PolicyVersion
from node.values.run import RunSettings
from node.weights.assembly.stored import StoredVersions
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import Manifest
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, plan_catch_up
from node.weights.store.artifact_files import Draft
from node.weights.store.artifact_store import ArtifactStore
from support.groups import SAMPLING
from support.whole_version import WholeVersion

LAYOUT = Layout.of([TensorSpec("a", (40,)), TensorSpec("b", (3, 7))])
FRAMED = Layout.of([TensorSpec("a", (40,)), TensorSpec("b", (3, 7))], frame_words=8)
"""The same words in many frames."""
KEY = SigningKey.generate()


def words_of(version: int) -> Words:
    """Some bf16 numbers near 1, a few of which differ from version to version."""
    words = np.full(LAYOUT.words, 0x3F80, np.uint16)
    words[: version % 10] += version
    return words


def held(version: int, layout: Layout = LAYOUT) -> HeldPolicy:
    return HeldPolicy.of(version, words_of(version), layout=layout)


def wide(words: Words, layout: Layout = LAYOUT) -> dict[str, torch.Tensor]:
    """The float32 numbers that round to some words."""
    flat = torch.from_numpy(words.copy()).view(torch.bfloat16).float()
    return {span.name: flat[span.start_word :][: span.words].view(span.shape) for span in layout.tensors}


def coder_of(words: Words, layout: Layout = LAYOUT) -> LocalCoder:
    """Return a coder that has some words as published."""
    coder = LocalCoder(MasterWords(wide(words, layout), layout), threads=1)
    coder.code_masters(lambda _: None)
    coder.keep()
    return coder


def masters_of(version: int) -> dict[str, torch.Tensor]:
    return wide(words_of(version))


def open_store(directory: Path) -> ArtifactStore:
    return ArtifactStore(directory, public_key=KEY.public_key, run_id="run", retained_keyframes=2)


@dataclass
class Publishing:
    access: MasterAccess
    masters: dict[str, torch.Tensor]
    store: ArtifactStore
    task: asyncio.Task[None]
    stopping: asyncio.Event
    registry: CollectorRegistry
    keyframes: list[int]
    """Head whenever the store was about to take a keyframe."""

    async def step(self, version: int, *, words_of: int | None = None) -> None:
        """Do what a training step does: write the masters when it may, then say what they hold."""
        await asyncio.to_thread(self.access.begin_writing)
        for name, tensor in masters_of(version if words_of is None else words_of).items():
            self.masters[name].copy_(tensor)
        self.access.hold(version)

    async def publish(self, version: int, base: int, *, words_of: int | None = None) -> None:
        """Take a step, and wait until its version can be fetched as a delta from ``base``."""
        await self.step(version, words_of=words_of)
        await self.stored(ArtifactKey(version, base))

    def counted(self, what: str) -> float | None:
        return self.registry.get_sample_value(f"heterorl_learner_{what}_total")

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.task, timeout=10)

    async def stored(self, key: ArtifactKey) -> None:
        """Wait until an artifact can be fetched."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        async with asyncio.timeout(10):
            with self.store.listening(lambda: loop.call_soon_threadsafe(changed.set)):
                while key not in self.keys:
                    await changed.wait()
                    changed.clear()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.task.get_loop()

    @property
    def head(self) -> int:
        announcement = self.store.announcement()
        return 0 if announcement is None else announcement.head.number

    @property
    def keys(self) -> list[ArtifactKey]:
        announcement = self.store.announcement()
        return [] if announcement is None else [artifact.key for artifact in announcement.artifacts]


@asynccontextmanager
async def publishing(
    directory: Path,
    *,
    start: HeldPolicy,
    hub_head: PolicyVersion | None = None,
    keyframe_every: int = 100,
    public_every: int = 100,
    lag: int = 0,
    layout: Layout = LAYOUT,
    threads: int = 2,
    max_staleness_versions: int = 1,
    oldest_usable: int = 0,
    leaves_out_unchanged: bool = True,
) -> AsyncIterator[Publishing]:
    async def run_settings() -> RunSettings:
        return RunSettings("addition", 2, 2, max_staleness_versions, 1.0, hub_head, SAMPLING)

    store, stopping, clock = open_store(directory), asyncio.Event(), SystemClock()
    registry = CollectorRegistry()
    instruments = Instruments.of(registry, NodeMetrics(registry, roles=["learner"], clock=clock), clock=clock)
    access = MasterAccess(version=start.version.number, monotonic=clock.monotonic)
    masters = wide(start.words)
    signer, stored = Signer(KEY, "run", 1), StoredVersions(store, layout, words_of(0))
    keyframes: list[int] = []

    def before_keyframe() -> None:
        head = store.head()
        keyframes.append(0 if head is None else head.number)

    publisher = Publisher(
        access,
        LocalCoder(MasterWords(masters, layout), threads=threads),
        FurtherArtifacts(
            stored,
            signer,
            keyframe_every_versions=keyframe_every,
            public_delta_every_versions=public_every,
            longest_lag_versions=lambda: lag,
        ),
        before_keyframe=before_keyframe,
        run_settings=run_settings,
        oldest_usable_version=lambda: oldest_usable,
        leaves_out_unchanged=leaves_out_unchanged,
        instruments=instruments,
    )
    is_ready = asyncio.Event()
    task = asyncio.create_task(publisher.run(ready=is_ready.set, stopping=stopping))
    ready = asyncio.create_task(is_ready.wait())
    await asyncio.wait({task, ready}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield Publishing(access, masters, store, task, stopping, registry, keyframes)
    finally:
        ready.cancel()
        task.cancel()
        await asyncio.wait({task})


def fetched(
    store: ArtifactStore, *, base: HeldPolicy | None, version: int, layout: Layout = LAYOUT
) -> HeldPolicy:
    """Walk from ``base`` to ``version`` as a sampler does."""
    announcement = store.announcement()
    assert announcement is not None
    number = -1 if base is None else base.version.number
    artifacts = [a for a in announcement.artifacts if a.key.base_version != PUBLIC_VERSION or number == 0]
    path = plan_catch_up(number, version, artifacts)
    assert path is not None
    for artifact in path:
        manifest = store.manifest(artifact.key)
        stage = WholeVersion(manifest, layout=layout, base=None if artifact.key.is_keyframe else base)
        stage.take_held()
        for frame in stage.missing():
            stage.put(frame, store.read_payload(artifact.key, frame))
        base = stage.finish()
    assert base is not None
    return base


class SlowDisk:
    """Holds ``put_version`` up in the thread that calls it."""

    def __init__(self, put: Callable[[Manifest, Draft], None]) -> None:
        self._put = put
        self._is_reached = threading.Event()
        self.goes_on = threading.Event()

    def __call__(self, manifest: Manifest, draft: Draft) -> None:
        self._is_reached.set()
        assert self.goes_on.wait(timeout=10)
        self._put(manifest, draft)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._is_reached.wait, 10)


@contextmanager
def slow_disk(store: ArtifactStore) -> Iterator[SlowDisk]:
    disk = SlowDisk(store.put_version)
    with mock.patch.object(store, "put_version", disk):
        yield disk
