"""The publisher with a real store: what a peer that fetches everything would end up with."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from bench.whole_versions import WholeVersion, encode_version
from learner.disk_wait import DiskWait
from learner.metrics import LearnerMetrics
from learner.publishing.catch_up_deltas import CatchUpDeltas
from learner.publishing.publisher import Publisher
from learner.publishing.publishing_schedule import PublishingSchedule
from learner.publishing.signer import Signer
from learner.training.master_access import MasterAccess
from learner.training.master_words import MasterWords
from node.clock import SystemClock
from node.errors import Reason, RefusedError, StartupError
from node.identity.signatures import SigningKey
from node.policy import ArtifactKey, PolicyVersion
from node.run import RunSettings
from node.telemetry.metrics import NodeMetrics
from node.weights.assembly.held import HeldPolicy
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import sign
from node.weights.planning.cheapest_chain import plan
from node.weights.store.artifact_files import Draft
from node.weights.store.artifact_store import ArtifactStore
from support.groups import SAMPLING
from support.weights import put_version

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


def masters_of(version: int) -> dict[str, torch.Tensor]:
    """The float32 numbers that round to ``words_of``."""
    wide = torch.from_numpy(words_of(version)).view(torch.bfloat16).float()
    return {span.name: wide[span.start_word :][: span.words].view(span.shape) for span in LAYOUT.tensors}


def open_store(directory: Path) -> ArtifactStore:
    return ArtifactStore(directory, public_key=KEY.public_key, run_id="run", retained_keyframes=2)


@dataclass
class Publishing:
    access: MasterAccess
    masters: dict[str, torch.Tensor]
    store: ArtifactStore
    task: asyncio.Task[None]
    stopping: asyncio.Event
    metrics: LearnerMetrics

    async def step(self, version: int) -> None:
        """Do what a training step does: write the masters when it may, then say what they hold."""
        await asyncio.to_thread(self.access.begin_writing)
        for name, tensor in masters_of(version).items():
            self.masters[name].copy_(tensor)
        self.access.hold(version)

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


def make_disk_wait() -> DiskWait:
    clock = SystemClock()
    node_metrics = NodeMetrics(CollectorRegistry(), roles=["learner"], clock=clock)
    return DiskWait(node_metrics=node_metrics, clock=clock, random=lambda: 0.1)


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
) -> AsyncIterator[Publishing]:
    async def run_settings() -> RunSettings:
        return RunSettings("addition", 2, 2, 1, 1.0, hub_head, SAMPLING)

    store, stopping, metrics = open_store(directory), asyncio.Event(), LearnerMetrics(CollectorRegistry())
    access = MasterAccess(version=start.version.number, monotonic=SystemClock().monotonic)
    masters = masters_of(start.version.number)
    signer = Signer(KEY, "run", 1)
    publisher = Publisher(
        access,
        MasterWords(masters, layout),
        store,
        start=start,
        layout=layout,
        signer=signer,
        threads=threads,
        schedule=PublishingSchedule(
            store,
            keyframe_every_versions=keyframe_every,
            public_delta_every_versions=public_every,
            longest_lag_versions=lambda: lag,
        ),
        catch_up=CatchUpDeltas(store, layout=layout, words0=words_of(0), signer=signer),
        run_settings=run_settings,
        disk_wait=make_disk_wait(),
        clock=SystemClock(),
        metrics=metrics,
    )
    is_ready = asyncio.Event()
    task = asyncio.create_task(publisher.run(ready=is_ready.set, stopping=stopping))
    ready = asyncio.create_task(is_ready.wait())
    await asyncio.wait({task, ready}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield Publishing(access, masters, store, task, stopping, metrics)
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
    path = plan(-1 if base is None else base.version.number, version, announcement.artifacts)
    assert path is not None
    for artifact in path:
        manifest, _ = store.manifest(artifact.key)
        stage = WholeVersion(
            manifest, layout=layout, base=None if artifact.key.is_keyframe else base, spare=None
        )
        stage.take_held()
        for frame in stage.missing():
            stage.put(frame, store.read_payload(artifact.key, frame))
        base = stage.finish()
    assert base is not None
    return base


async def test_every_version_it_has_time_for_becomes_a_delta_from_the_one_before(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        for version in (1, 2, 5):
            await running.step(version)
            await running.stored(ArtifactKey(version, running.head))
        assert running.keys == [ArtifactKey(1, 0), ArtifactKey(2, 1), ArtifactKey(5, 2)]
        assert (fetched(running.store, base=held(0), version=5).words == words_of(5)).all()


async def test_a_version_the_next_step_was_faster_than_is_never_published(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        with slow_disk(running.store) as disk:
            await running.step(1)
            await disk.reached()
            for version in (2, 3):
                await running.step(version)
            disk.goes_on.set()
        await running.stored(ArtifactKey(3, 1))
        assert running.keys == [ArtifactKey(1, 0), ArtifactKey(3, 1)]
        await running.step(4)
        await running.stored(ArtifactKey(4, 3))
        assert running.metrics.superseded_versions._value.get() == 1


class SlowDisk:
    """Holds ``put_version`` up in the thread that calls it."""

    def __init__(self, put: Callable[[bytes, Draft], None]) -> None:
        self._put = put
        self._is_reached = threading.Event()
        self.goes_on = threading.Event()

    def __call__(self, signed: bytes, draft: Draft) -> None:
        self._is_reached.set()
        assert self.goes_on.wait(timeout=10)
        self._put(signed, draft)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._is_reached.wait, 10)


@contextmanager
def slow_disk(store: ArtifactStore) -> Iterator[SlowDisk]:
    disk = SlowDisk(store.put_version)
    with mock.patch.object(store, "put_version", disk):
        yield disk


async def test_training_writes_on_as_soon_as_the_masters_were_read_whatever_the_disk_does(
    tmp_path: Path,
) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        with slow_disk(running.store) as disk:
            await running.step(1)
            await disk.reached()
            await asyncio.wait_for(running.step(2), timeout=10)
            disk.goes_on.set()
        await running.stored(ArtifactKey(2, 1))
        assert (fetched(running.store, base=held(0), version=1).words == words_of(1)).all()


@contextmanager
def no_room(store: ArtifactStore, failing: str) -> Iterator[threading.Semaphore]:
    """Let a store refuse for want of room; yields what counts its refusals."""
    refusals = threading.Semaphore(0)

    def fail(*_: object) -> None:
        refusals.release()
        raise RefusedError(Reason.DISK, "no room")

    with mock.patch.object(store, failing, fail):
        yield refusals


async def refused(refusals: threading.Semaphore, times: int = 1) -> None:
    for _ in range(times):
        assert await asyncio.to_thread(refusals.acquire, timeout=10)


async def test_versions_the_disk_had_no_room_for_give_way_to_the_newest_from_the_same_base(
    tmp_path: Path,
) -> None:
    async with publishing(tmp_path, start=held(0, FRAMED), layout=FRAMED) as running:
        await running.step(1)
        await running.stored(ArtifactKey(1, 0))
        with no_room(running.store, "draft") as drafts:
            for version in (2, 3, 4):
                await running.step(version)
                await refused(drafts, 2)
        await running.stored(ArtifactKey(4, 1))
        made = fetched(running.store, base=held(0, FRAMED), version=4, layout=FRAMED)
        assert (made.words == words_of(4)).all()
        assert ArtifactKey(3, 1) not in running.keys


@pytest.mark.parametrize("failing", ["draft", "put_version"])
async def test_a_version_the_disk_has_no_room_for_is_published_when_there_is_some(
    tmp_path: Path, failing: str
) -> None:
    """Though no step comes after it: the next groups may depend on it."""
    async with publishing(tmp_path, start=held(0)) as running:
        with no_room(running.store, failing) as refusals:
            await running.step(1)
            await refused(refusals, 3)
            assert running.keys == []
        await running.stored(ArtifactKey(1, 0))
        assert (fetched(running.store, base=held(0), version=1).words == words_of(1)).all()
        await running.step(2)
        await running.stored(ArtifactKey(2, 1))


async def test_a_start_on_a_full_disk_waits_and_publishes_its_checkpoint_then(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        await running.stop()
    with mock.patch.object(ArtifactStore, "draft", side_effect=RefusedError(Reason.DISK, "no room")) as draft:
        starting = asyncio.create_task(_published_keys(tmp_path, start=held(5)))
        while draft.call_count < 2:  # noqa: ASYNC110 - what is called has no event
            await asyncio.sleep(0.005)
    assert await asyncio.wait_for(starting, timeout=10) == [ArtifactKey(5)]


async def _published_keys(directory: Path, *, start: HeldPolicy) -> list[ArtifactKey]:
    async with publishing(directory, start=start) as running:
        return running.keys


async def test_a_publisher_that_waits_for_room_stops(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        with no_room(running.store, "draft") as refusals:
            await running.step(1)
            await refused(refusals, 2)
            await running.stop()
        assert running.keys == []


async def test_a_keyframe_is_made_beside_the_delta_every_so_many_versions(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0), keyframe_every=3) as running:
        for version in (1, 2, 4, 5, 7):
            await running.step(version)
            await running.stored(ArtifactKey(version, running.head))
        await running.stop()
        keyframes = [key for key in running.keys if key.is_keyframe]
        assert keyframes == [ArtifactKey(4), ArtifactKey(7)]
        assert (fetched(running.store, base=None, version=7).words == words_of(7)).all()


async def test_what_waits_is_still_published_when_the_learner_stops(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        await running.step(1)
        await running.stop()
        assert running.keys == [ArtifactKey(1, 0)]


async def test_two_arrays_of_words_do_however_many_versions_there_are(tmp_path: Path) -> None:
    arrays = {}
    read = MasterWords.read

    def watched(self: MasterWords, frame: int, words: Words) -> None:
        assert words.base is not None
        arrays[id(words.base)] = words.base  # Kept alive, or an address would come again.
        read(self, frame, words)

    with mock.patch.object(MasterWords, "read", watched):
        async with publishing(tmp_path, start=held(0), keyframe_every=3) as running:
            for version in range(1, 20):
                await running.step(version)
                await running.stored(ArtifactKey(version, version - 1))
            await running.stop()
    assert len(arrays) == 2


@pytest.mark.parametrize("threads", [1, 3])
async def test_a_pass_shared_by_threads_makes_the_same_artifact_as_coding_the_whole(
    tmp_path: Path, threads: int
) -> None:
    async with publishing(tmp_path, start=held(0, FRAMED), layout=FRAMED, threads=threads) as running:
        await running.step(9)
        await running.stored(ArtifactKey(9, 0))
        manifest, _ = running.store.manifest(ArtifactKey(9, 0))
        whole = encode_version(
            words_of(9),
            version=9,
            base=held(0, FRAMED),
            layout=FRAMED,
            run_id="run",
            learner_epoch=1,
            published_at_s=manifest.published_at_s,
        )
        assert manifest == whole.manifest
        stored = tuple(
            running.store.read_payload(manifest.key, frame) if len(payload) else b""
            for frame, payload in enumerate(whole.payloads)
        )
        assert stored == whole.payloads


async def test_after_a_restart_at_the_newest_published_version_deltas_go_on(tmp_path: Path) -> None:
    for start, version in ((0, 1), (1, 2)):
        async with publishing(tmp_path, start=held(start)) as running:
            await running.step(version)
            await running.stop()
    assert running.keys == [ArtifactKey(1, 0), ArtifactKey(2, 1)]


async def test_after_a_restart_from_an_unpublished_version_that_version_is_a_keyframe(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        await running.step(1)
        await running.stop()
    async with publishing(tmp_path, start=held(3), hub_head=held(1).version) as running:
        await running.step(4)
        await running.stop()
        assert running.keys == [ArtifactKey(1, 0), ArtifactKey(3), ArtifactKey(4, 3)]
        assert (fetched(running.store, base=None, version=4).words == words_of(4)).all()


@pytest.mark.parametrize("head", [held(4).version, PolicyVersion(3, b"x" * 16)])
async def test_a_learner_behind_the_run_or_on_another_branch_does_not_start(
    tmp_path: Path, head: PolicyVersion
) -> None:
    async with publishing(tmp_path, start=held(3), hub_head=head) as running:
        with pytest.raises(StartupError, match=f"ersion {head.number}"):
            await running.task
        assert running.keys == []


async def test_a_version_that_is_not_finite_ends_the_learner_and_is_not_published(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0, FRAMED), layout=FRAMED) as running:
        await asyncio.to_thread(running.access.begin_writing)
        running.masters["b"][1, 2] = torch.inf
        running.access.hold(1)
        with pytest.raises(RefusedError, match="tensor 'b' has a NaN or an infinity at element 9"):
            await asyncio.wait_for(asyncio.shield(running.task), timeout=10)
        assert running.keys == []
        # Nobody reads any more: a step that was waiting goes on, and ends with the learner.
        await asyncio.wait_for(asyncio.to_thread(running.access.begin_writing), timeout=10)


async def test_in_its_spare_time_it_makes_deltas_over_many_versions_for_those_who_are_behind(
    tmp_path: Path,
) -> None:
    async with publishing(tmp_path, start=held(0), public_every=8, lag=4) as publishing_:
        for version in range(1, 9):
            await publishing_.step(version)
            await publishing_.stored(ArtifactKey(version, version - 1))
        await publishing_.stored(ArtifactKey(8, 4))
        await publishing_.stored(ArtifactKey(8, 0))
        for base in (0, 4):
            assert fetched(publishing_.store, base=held(base), version=8).version == held(8).version


async def test_while_nobody_is_behind_it_makes_steps_only(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0), public_every=100) as publishing_:
        for version in range(1, 9):
            await publishing_.step(version)
            await publishing_.stored(ArtifactKey(version, version - 1))
        await publishing_.stop()
        assert [key.base_version for key in publishing_.keys] == list(range(8))


def test_a_merge_is_left_when_a_newer_version_waits(tmp_path: Path) -> None:
    store, signer = open_store(tmp_path), Signer(KEY, "run", 1)
    catch_up = CatchUpDeltas(store, layout=LAYOUT, words0=words_of(0), signer=signer)
    schedule = PublishingSchedule(
        store, keyframe_every_versions=100, public_delta_every_versions=2, longest_lag_versions=lambda: 0
    )
    for version in (1, 2):
        encoded = encode_version(
            words_of(version),
            version=version,
            base=held(version - 1),
            layout=LAYOUT,
            run_id="run",
            learner_epoch=1,
            published_at_s=0.0,
        )
        put_version(store, sign(encoded.manifest, KEY), encoded.payloads)
    assert schedule.next_catch_up(2) == ArtifactKey(2, 0)
    assert catch_up.make(held(2), ArtifactKey(2, 0), is_superseded=lambda: True)
    assert schedule.next_catch_up(2) == ArtifactKey(2, 0)
    assert catch_up.make(held(2), ArtifactKey(2, 0), is_superseded=lambda: False)
    assert schedule.next_catch_up(2) is None
    assert schedule.next_catch_up(1) is None
