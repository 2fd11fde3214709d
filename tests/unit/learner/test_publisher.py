"""The publisher with a real store: what a peer that fetches everything would end up with."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from learner.catch_up import CatchUp, Signer
from learner.mailbox import Snapshot, SnapshotMailbox
from learner.metrics import LearnerMetrics
from learner.publisher import Publisher
from node.clock import SystemClock
from node.errors import RefusedError, StartupError
from node.identity.signatures import SigningKey
from node.policy import ArtifactKey, PolicyVersion
from node.run import RunSettings
from node.weights.apply import Stage
from node.weights.chain import plan
from node.weights.digests import Words
from node.weights.encode import encode_version
from node.weights.held import HeldPolicy
from node.weights.layout import Layout, TensorSpec
from node.weights.manifest import sign
from node.weights.store import ArtifactStore
from support.groups import SAMPLING

LAYOUT = Layout.of([TensorSpec("a", (40,)), TensorSpec("b", (3, 7))])
KEY = SigningKey.generate()
NAN = 0x7FC0


def words_of(version: int) -> Words:
    """Some bf16 numbers near 1, a few of which differ from version to version."""
    words = np.full(LAYOUT.words, 0x3F80, np.uint16)
    words[: version % 10] += version
    return words


def held(version: int) -> HeldPolicy:
    return HeldPolicy.of(version, words_of(version), layout=LAYOUT)


def open_store(directory: Path) -> ArtifactStore:
    return ArtifactStore(directory, public_key=KEY.public_key, run_id="run", retained_keyframes=2)


@dataclass
class Publishing:
    mailbox: SnapshotMailbox
    store: ArtifactStore
    task: asyncio.Task[None]
    stopping: asyncio.Event

    def put(self, version: int) -> None:
        words = self.mailbox.blank()
        words[:] = words_of(version)
        self.mailbox.put(Snapshot(version, words, taken_at_s=0.0))

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
) -> AsyncIterator[Publishing]:
    async def run_settings() -> RunSettings:
        return RunSettings("addition", 2, 2, 1, 1.0, hub_head, SAMPLING)

    store, mailbox, stopping = open_store(directory), SnapshotMailbox(LAYOUT.words), asyncio.Event()
    signer = Signer(KEY, "run", 1)
    publisher = Publisher(
        mailbox,
        store,
        start=start,
        layout=LAYOUT,
        signer=signer,
        keyframe_every_versions=keyframe_every,
        catch_up=CatchUp(
            store,
            layout=LAYOUT,
            words0=words_of(0),
            signer=signer,
            public_every_versions=public_every,
            longest_lag_versions=lambda: lag,
        ),
        run_settings=run_settings,
        clock=SystemClock(),
        metrics=LearnerMetrics(CollectorRegistry()),
    )
    is_ready = asyncio.Event()
    task = asyncio.create_task(publisher.run(ready=is_ready.set, stopping=stopping))
    ready = asyncio.create_task(is_ready.wait())
    await asyncio.wait({task, ready}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield Publishing(mailbox, store, task, stopping)
    finally:
        ready.cancel()
        task.cancel()
        await asyncio.wait({task})


def fetched(store: ArtifactStore, *, base: HeldPolicy | None, version: int) -> HeldPolicy:
    """Walk from ``base`` to ``version`` as a sampler does."""
    announcement = store.announcement()
    assert announcement is not None
    path = plan(-1 if base is None else base.version.number, version, announcement.artifacts)
    assert path is not None
    for artifact in path:
        manifest, _ = store.manifest(artifact.key)
        stage = Stage(manifest, layout=LAYOUT, base=None if artifact.key.is_keyframe else base, spare=None)
        stage.take_held()
        for frame in stage.missing():
            stage.put(frame, store.read_payload(artifact.key, frame))
        base = stage.finish()
    assert base is not None
    return base


async def test_every_snapshot_taken_in_time_becomes_a_delta_from_the_one_before(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        for version in (1, 2, 5):
            running.put(version)
            await running.stored(ArtifactKey(version, running.head))
        assert running.keys == [ArtifactKey(1, 0), ArtifactKey(2, 1), ArtifactKey(5, 2)]
        assert (fetched(running.store, base=held(0), version=5).words == words_of(5)).all()


async def test_only_the_newest_of_the_snapshots_that_wait_is_published(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        for version in (1, 2, 3):  # the publisher has no chance to run in between
            running.put(version)
        await running.stored(ArtifactKey(3, 0))
        assert running.keys == [ArtifactKey(3, 0)]


async def test_a_keyframe_is_made_beside_the_delta_every_so_many_versions(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0), keyframe_every=3) as running:
        for version in (1, 2, 4, 5, 7):
            running.put(version)
            await running.stored(ArtifactKey(version, running.head))
        await running.stop()
        keyframes = [key for key in running.keys if key.is_keyframe]
        assert keyframes == [ArtifactKey(4), ArtifactKey(7)]
        assert (fetched(running.store, base=None, version=7).words == words_of(7)).all()


async def test_what_waits_is_still_published_when_the_learner_stops(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        running.put(1)
        await running.stop()
        assert running.keys == [ArtifactKey(1, 0)]


async def test_memory_is_bounded_however_many_versions_there_are(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        arrays = {}  # kept alive, or an address would come again
        for version in range(1, 20):
            words = running.mailbox.blank()
            arrays[words.ctypes.data] = words
            words[:] = words_of(version)
            running.mailbox.put(Snapshot(version, words, taken_at_s=0.0))
            await asyncio.sleep(0)
        await running.stop()
        assert len(arrays) <= 4


async def test_after_a_restart_at_the_newest_published_version_deltas_go_on(tmp_path: Path) -> None:
    for start, version in ((0, 1), (1, 2)):
        async with publishing(tmp_path, start=held(start)) as running:
            running.put(version)
            await running.stop()
    assert running.keys == [ArtifactKey(1, 0), ArtifactKey(2, 1)]


async def test_after_a_restart_from_an_unpublished_version_that_version_is_a_keyframe(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        running.put(1)
        await running.stop()
    async with publishing(tmp_path, start=held(3), hub_head=held(1).version) as running:
        running.put(4)
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
    async with publishing(tmp_path, start=held(0)) as running:
        words = running.mailbox.blank()
        words[:] = words_of(1)
        words[45] = NAN
        running.mailbox.put(Snapshot(1, words, taken_at_s=0.0))
        with pytest.raises(RefusedError, match="tensor 'b'"):
            await asyncio.wait_for(asyncio.shield(running.task), timeout=10)
        assert running.keys == []


async def test_in_its_spare_time_it_makes_deltas_over_many_versions_for_those_who_are_behind(
    tmp_path: Path,
) -> None:
    async with publishing(tmp_path, start=held(0), public_every=8, lag=4) as publishing_:
        for version in range(1, 9):
            publishing_.put(version)
            await publishing_.stored(ArtifactKey(version, version - 1))
        await publishing_.stored(ArtifactKey(8, 4))
        await publishing_.stored(ArtifactKey(8, 0))
        for base in (0, 4):
            assert fetched(publishing_.store, base=held(base), version=8).version == held(8).version


async def test_while_nobody_is_behind_it_makes_steps_only(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0), public_every=100) as publishing_:
        for version in range(1, 9):
            publishing_.put(version)
            await publishing_.stored(ArtifactKey(version, version - 1))
        await publishing_.stop()
        assert [key.base_version for key in publishing_.keys] == list(range(8))


def test_a_merge_is_left_when_a_newer_version_waits(tmp_path: Path) -> None:
    store, signer = open_store(tmp_path), Signer(KEY, "run", 1)
    catch_up = CatchUp(
        store,
        layout=LAYOUT,
        words0=words_of(0),
        signer=signer,
        public_every_versions=2,
        longest_lag_versions=lambda: 0,
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
        store.put_version(sign(encoded.manifest, KEY), encoded.payloads)
    assert catch_up.next_key(2) == ArtifactKey(2, 0)
    catch_up.make(held(2), ArtifactKey(2, 0), is_superseded=lambda: True)
    assert catch_up.next_key(2) == ArtifactKey(2, 0)
    catch_up.make(held(2), ArtifactKey(2, 0), is_superseded=lambda: False)
    assert catch_up.next_key(2) is None
    assert catch_up.next_key(1) is None
