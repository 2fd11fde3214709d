"""Weights by way of an object store: a real S3 API in a process of its own, which nobody relies on."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.held_policy import HeldPolicy
from node.errors import Reason
from node.values import limits
from node.values.policy import ArtifactKey
from node.weights.format.layout import Layout, TensorSpec
from node.weights.transfer.bucket import Bucket, object_name
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.source_turns import bucket_of
from node.weights.transfer.sources import Sources
from support.fetching import fetch_version
from support.hub import running_hub
from support.identity import MadeRun
from support.object_store import NAME, ObjectStore, blocks, read, write
from support.policy_hub import (
    Answers,
    PolicyHub,
    Pushing,
    Registry,
    make_fetcher,
    make_sources,
    policy_hub,
)
from support.refusals import refused
from support.relay import running_relay
from support.uploading import uploading
from support.waiting import eventually, until
from support.weights import Learner

DELTA, KEYFRAME = ArtifactKey(1, 0), ArtifactKey(1)
LARGE = Layout.of([TensorSpec("a", (1_500_000,)), TensorSpec("b", (10,))])
"""Keyframe payloads of 1.5 MiB."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    started = ObjectStore(tmp_path_factory.mktemp("s3") / "log")
    try:
        yield started
    finally:
        started.kill()


@pytest.fixture
async def objects(server: ObjectStore) -> ObjectStore:
    """Return the server, which runs and is empty."""
    await server.start()
    return server


async def refusing(number: int, answers: Answers) -> Answers:
    """Answer no request for frames."""
    raise AssertionError("the hub was asked for frames")
    yield  # makes it a generator


@asynccontextmanager
async def listening(sources: Sources) -> AsyncIterator[None]:
    """Hear what sources announce while the body runs."""

    async def listen() -> None:
        async for _ in sources.announcements():
            pass

    task = asyncio.create_task(listen())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def following(hub: PolicyHub, registry: Registry, **limits: int) -> AsyncIterator[Fetcher]:
    """Return a sampler's fetcher, which hears what the hub announces while the body runs."""
    fetcher = await hub.fetcher(registry, **limits)
    async with listening(fetcher.sources):
        yield fetcher


async def in_bucket(hub: PolicyHub, fetcher: Fetcher, key: ArtifactKey) -> None:
    """Wait until a fetcher would read an artifact from the bucket."""
    here = (bucket_of(hub.serving.address),)
    await until(lambda: fetcher.sources.readable(key) == here)


async def fetched(hub: PolicyHub, fetcher: Fetcher, key: ArtifactKey) -> HeldPolicy:
    """Fetch a version whole; whatever a source did, it is the one the learner made."""
    held = None if key.is_keyframe else hub.learner.versions[key.base_version]
    got = await fetch_version(fetcher, await fetcher.manifest(key), layout=hub.learner.layout, held=held)
    np.testing.assert_array_equal(got.words, hub.learner.words(key.version))
    return got


def name_of(hub: PolicyHub, key: ArtifactKey) -> str:
    return object_name(hub.store.manifest(key))


def in_bucket_of(hub: PolicyHub) -> list[ArtifactKey]:
    announcement = hub.store.announcement()
    assert hub.bucket is not None
    return [] if announcement is None else list(hub.bucket.announced(announcement).in_bucket)


async def is_like_the_store(bucket: Bucket, hub: PolicyHub) -> bool:
    there = {object_name(manifest): manifest.size_bytes for manifest in hub.store.whole()}
    return await bucket.listing() == there


@pytest.mark.parametrize("streams", [1, 3])
async def test_a_version_arrives_by_the_bucket_while_the_hub_sends_no_payload(
    made: MadeRun, tmp_path: Path, objects: ObjectStore, streams: int
) -> None:
    async with policy_hub(made, tmp_path / "hub", layout=LARGE, bucket=objects.bucket()) as hub:
        hub.servicer.spoil = refusing
        hub.learner.put(hub.store, (1, 0), (1, None))
        registry = Registry()
        async with following(hub, registry, streams=streams) as fetcher:
            for key in (DELTA, KEYFRAME):
                await in_bucket(hub, fetcher, key)
                await fetched(hub, fetcher, key)
        sizes = sum(hub.store.manifest(key).size_bytes for key in (DELTA, KEYFRAME))
        assert registry.value("heterorl_node_bucket_bytes_total", direction="in") == sizes
        assert registry.transferred("keyframe", "in") + registry.transferred("delta", "in") == sizes
        assert hub.registry.value("heterorl_node_bucket_bytes_total", direction="out") == sizes
        assert hub.registry.value("heterorl_node_bucket_missing_artifacts") == 0
        assert hub.servicer.fetches == []


async def test_a_bit_that_flips_in_the_bucket_costs_one_frame_which_comes_from_elsewhere(
    made: MadeRun, tmp_path: Path, objects: ObjectStore
) -> None:
    bucket = objects.bucket()
    async with policy_hub(made, tmp_path / "hub", layout=LARGE, bucket=bucket) as hub:
        hub.learner.put(hub.store, (1, None))
        registry = Registry()
        async with following(hub, registry, most_streams=1) as fetcher:  # frame 0, then 1
            await in_bucket(hub, fetcher, KEYFRAME)
            stored = bytearray(await read(bucket, name_of(hub, KEYFRAME)))
            stored[0] ^= 1  # of frame 1: objects begin with small frames
            await write(bucket, name_of(hub, KEYFRAME), bytes(stored))
            await fetched(hub, fetcher, KEYFRAME)
            assert fetcher.sources.readable(KEYFRAME) == (hub.serving.address,)
        assert registry.value("heterorl_node_frames_damaged_total") == 1
        assert registry.value("heterorl_node_source_faults_total", fault="damaged") == 1
        assert {frame for request in hub.servicer.fetches for frame in request.frames} == {1}


async def test_an_object_that_was_cut_short_is_a_lie_and_the_hub_sends_the_frames(
    made: MadeRun, tmp_path: Path, objects: ObjectStore
) -> None:
    bucket = objects.bucket()
    async with policy_hub(made, tmp_path / "hub", layout=LARGE, bucket=bucket) as hub:
        hub.learner.put(hub.store, (1, None))
        registry = Registry()
        async with following(hub, registry, most_streams=1) as fetcher:  # the hub sends nothing meanwhile
            await in_bucket(hub, fetcher, KEYFRAME)
            stored = await read(bucket, name_of(hub, KEYFRAME))
            await write(bucket, name_of(hub, KEYFRAME), stored[: len(stored) // 2])
            await fetched(hub, fetcher, KEYFRAME)
        assert registry.value("heterorl_node_source_faults_total", fault="lied") > 0
        assert registry.value("heterorl_node_frames_damaged_total") == 0


async def test_what_disappears_from_the_bucket_is_fetched_from_the_hub_and_put_again(
    made: MadeRun, tmp_path: Path, objects: ObjectStore
) -> None:
    bucket = objects.bucket()
    async with policy_hub(made, tmp_path / "hub", bucket=bucket) as hub:
        hub.learner.put(hub.store, (1, 0))
        name = name_of(hub, DELTA)

        async def is_there() -> bool:
            return name in await bucket.listing()

        async with following(hub, Registry()) as fetcher:
            await in_bucket(hub, fetcher, DELTA)
            await fetched(hub, fetcher, DELTA)
            assert hub.servicer.fetches == []
            await bucket.delete([name])
            await fetched(hub, fetcher, DELTA)
            await eventually(is_there)
            await in_bucket(hub, fetcher, DELTA)


async def test_the_bucket_keeps_what_the_store_keeps_and_nothing_of_ours_beside_it(
    made: MadeRun, tmp_path: Path, objects: ObjectStore
) -> None:
    bucket = objects.bucket()
    left_over = "7-6-0123456789abcdef"
    await bucket.put(left_over, blocks(b"of an earlier process"), size_bytes=21)
    await write(bucket, "notes.txt", b"somebody's")
    async with policy_hub(made, tmp_path / "hub", bucket=bucket) as hub:
        hub.learner.put(hub.store, (1, 0), (1, None))
        await eventually(partial(is_like_the_store, bucket, hub))
        hub.learner.put(hub.store, (2, 1), (2, None), (3, 2), (3, None))
        assert ArtifactKey(1) not in [manifest.key for manifest in hub.store.whole()]
        await eventually(partial(is_like_the_store, bucket, hub))
    assert await read(bucket, "notes.txt") == b"somebody's"


async def test_an_object_of_more_than_one_part_is_whole(objects: ObjectStore) -> None:
    bucket, block = objects.bucket(), bytes(range(256)) * (1 << 14)
    await bucket.put("1-key-0123456789abcdef", blocks(block, block, block), size_bytes=3 * len(block))
    assert await read(bucket, "1-key-0123456789abcdef") == 3 * block


async def test_a_bucket_that_is_away_or_killed_under_load_delays_no_version_and_loses_none(
    made: MadeRun, tmp_path: Path, objects: ObjectStore
) -> None:
    keys = [ArtifactKey(version, version - 1) for version in range(1, 13)]
    bucket = objects.bucket()
    objects.kill()
    async with policy_hub(made, tmp_path / "hub", bucket=bucket) as hub:
        registry, restarts = Registry(), list[asyncio.Task[None]]()
        failures = partial(hub.registry.value, "heterorl_node_bucket_failures_total", operation="list")
        async with following(hub, registry) as fetcher:
            for key in keys:
                await asyncio.to_thread(hub.learner.put, hub.store, (key.version, key.base_version))
                if key.version == 6:
                    objects.kill()
                    restarts.append(asyncio.create_task(objects.start()))
                await fetched(hub, fetcher, key)
                if key.version == 2:
                    await until(lambda: failures() > 0)
                    await objects.start()
                    await in_bucket(hub, fetcher, key)
            await asyncio.gather(*restarts)
            await eventually(partial(is_like_the_store, bucket, hub))
            for key in keys:
                await in_bucket(hub, fetcher, key)
            asked = len(hub.servicer.fetches)
            await fetched(hub, fetcher, keys[-1])
            assert len(hub.servicer.fetches) == asked
        assert len(await bucket.listing()) == len(keys)
        assert registry.value("heterorl_node_frames_damaged_total") == 0


async def test_a_large_artifact_is_announced_when_it_is_in_the_bucket_which_delays_it_for_a_bounded_time(
    made: MadeRun, tmp_path: Path, objects: ObjectStore
) -> None:
    bucket, hold_s = objects.bucket(), 60.0
    async with policy_hub(
        made, tmp_path / "hub", layout=LARGE, bucket=bucket, hold_s=lambda _: hold_s
    ) as hub:
        hub.learner.put(hub.store, (1, 0))
        await until(lambda: in_bucket_of(hub) == [DELTA])
        hub.learner.put(hub.store, (2, None))
        assert hub.store.head() == hub.learner.versions[1].version
        await until(lambda: hub.store.head() == hub.learner.versions[2].version)
        assert in_bucket_of(hub) == [DELTA, ArtifactKey(2)]
        objects.halt()
        hold_s = 0.2
        hub.learner.put(hub.store, (3, None))
        assert hub.store.head() == hub.learner.versions[2].version
        await until(lambda: hub.store.head() == hub.learner.versions[3].version)
        hub.learner.put(hub.store, (4, None))
        assert hub.store.head() == hub.learner.versions[4].version, "the next is not delayed at all"
        assert ArtifactKey(4) not in in_bucket_of(hub)
        objects.go_on()
        await eventually(partial(is_like_the_store, bucket, hub))


async def test_a_hub_with_a_bucket_pushes_small_payloads_only(
    made: MadeRun, tmp_path: Path, objects: ObjectStore
) -> None:
    async with policy_hub(made, tmp_path / "hub", layout=LARGE, bucket=objects.bucket()) as hub:
        hub.servicer.pushes = Pushing.PUSHES
        hub.learner.put(hub.store, (1, 0))
        async with following(hub, Registry()) as fetcher:
            assert fetcher.sources.push_bytes(hub.serving.address) == limits.PUSH_BYTES
            await in_bucket(hub, fetcher, DELTA)
            assert fetcher.sources.push_bytes(hub.serving.address) == limits.DIRECT_BYTES
            async with asyncio.TaskGroup() as tasks:
                fetcher.prefetch(1, tasks)
                await until(lambda: hub.servicer.awaited == [1])
                hub.learner.put(hub.store, (11, 1))
                await in_bucket(hub, fetcher, ArtifactKey(11, 1))
                await fetched(hub, fetcher, ArtifactKey(11, 1))
        pushed = hub.registry.transferred("delta", "out")
        assert hub.store.manifest(ArtifactKey(11, 1)).size_bytes > limits.DIRECT_BYTES >= pushed


async def test_a_hub_locates_only_what_is_in_its_bucket(
    made: MadeRun, tmp_path: Path, objects: ObjectStore
) -> None:
    async with policy_hub(made, tmp_path / "hub", bucket=objects.bucket()) as hub:
        assert hub.bucket is not None
        with refused(Reason.UNKNOWN_VERSION):
            await hub.bucket.locate(DELTA)
        hub.learner.put(hub.store, (1, 0))
        await until(lambda: in_bucket_of(hub) == [DELTA])
        url, valid_s = await hub.bucket.locate(DELTA)
        assert url.startswith(f"{objects.url}/weights/runs/example/hub-1/1-0-")
        assert 0 < valid_s < 3601  # Unix seconds are rounded to .2 us
        assert (await hub.bucket.locate(DELTA))[0] == url


async def test_a_version_goes_from_learner_to_sampler_by_the_buckets_of_coordinator_and_relay_alone(
    made: MadeRun, tmp_path: Path, objects: ObjectStore
) -> None:
    learner = Learner(layout=LARGE, run_id=made.run_id, key=made.signing_key)
    published = learner.store(tmp_path / "published")
    learner.put(published, (1, None))
    url, size_bytes = f"s3://{NAME}/fleet", published.manifest(KEYFRAME).size_bytes
    with objects.credentials():
        async with (
            running_hub(made, bucket=url) as hub,
            running_relay(made, tmp_path / "relay", coordinator=hub.address, bucket=url) as relay,
            uploading(made, published, hub.address),
        ):
            registry = Registry()
            sources = make_sources(registry, relay.source())
            async with listening(sources):
                there = (bucket_of(relay.address),)
                await until(lambda: sources.readable(KEYFRAME) == there)
                fetcher = make_fetcher(made, sources, registry)
                got = await fetch_version(fetcher, await fetcher.manifest(KEYFRAME), layout=LARGE, held=None)
            np.testing.assert_array_equal(got.words, learner.words(1))
            assert hub.metric("heterorl_node_bucket_bytes_total", direction="out") == size_bytes
            assert hub.metric("heterorl_node_transfer_bytes_total", kind="keyframe", direction="out") == 0
            for peer in (relay.registry, registry):
                assert peer.value("heterorl_node_bucket_bytes_total", direction="in") == size_bytes
                assert peer.transferred("keyframe", "out") == 0
