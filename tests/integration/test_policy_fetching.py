"""Policy versions over real connections: whatever happens on the way, bit-exact or not at all."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from bench.held_policy import HeldPolicy
from deploy.demo.damaging_node import damage_first
from node.errors import Reason
from node.identity.signatures import SigningKey
from node.rpc.call_ends import ConnectionLost
from node.values import limits
from node.values.policy import ArtifactKey
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import DamagedFrameError
from node.weights.planning.cheapest_chain import plan_fresh
from node.weights.transfer.fetcher import Fetcher
from support.fetching import fetch_version
from support.identity import MadeRun
from support.policy_hub import Answers, PolicyHub, Registry, policy_hub, policy_hub_fixture
from support.refusals import refused
from support.waiting import until
from support.weights import LAYOUT, Learner
from support.whole_version import WholeVersion

DELTA = ArtifactKey(1, 0)


hub = policy_hub_fixture()


large = pytest.mark.parametrize(
    "hub", [Layout.of([TensorSpec("a", (1_500_000,)), TensorSpec("b", (10,))])], indirect=True
)


"""Keyframe payloads of 1.5 MiB: two pieces and a bit on the wire."""


async def fetch(hub: PolicyHub, fetcher: Fetcher, key: ArtifactKey, *, held: HeldPolicy | None) -> HeldPolicy:
    return await fetch_version(fetcher, await fetcher.manifest(key), layout=hub.learner.layout, held=held)


async def arrives(hub: PolicyHub, fetcher: Fetcher, base: int | None) -> None:
    """Publish version 1, from a base or whole, and fetch it."""
    hub.learner.put(hub.store, (1, base))
    key = ArtifactKey(1) if base is None else ArtifactKey(1, base)
    held = await fetch(hub, fetcher, key, held=None if base is None else hub.learner.versions[base])
    assert held.version == hub.learner.versions[1].version


@pytest.mark.parametrize("channels", [1, 3])
async def test_a_sampler_walks_a_chain_from_the_public_model_to_the_head(
    hub: PolicyHub, channels: int
) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1), (3, 2))
    registry = Registry()
    fetcher = await hub.fetcher(registry, channels=channels)
    announcement = hub.store.announcement()
    assert announcement is not None
    path = plan_fresh(announcement.head.number, announcement.artifacts)
    assert path is not None
    held = hub.learner.versions[0]
    for artifact in path:
        held = await fetch(hub, fetcher, artifact.key, held=held)
    assert held.version == announcement.head
    np.testing.assert_array_equal(held.words, hub.learner.words(3))
    size_bytes = sum(artifact.size_bytes for artifact in path)
    assert registry.transferred("delta", "in") == size_bytes
    assert hub.registry.transferred("delta", "out") == size_bytes


async def test_a_damaged_frame_is_fetched_again_alone(hub: PolicyHub) -> None:
    hub.servicer.damage = damage_first(1)
    registry = Registry()
    await arrives(hub, await hub.fetcher(registry, streams=1), 0)
    assert [list(request.frames) for request in hub.servicer.fetches] == [[0, 1, 2, 3, 4], [0]]
    frames = hub.learner.encode(1, 0).payloads
    assert registry.transferred("delta", "in") == sum(map(len, frames)) + len(frames[0])
    assert registry.value("heterorl_node_frames_damaged_total") == 1


async def test_a_frame_that_stays_damaged_is_given_up_after_three_attempts(hub: PolicyHub) -> None:
    hub.servicer.damage = damage_first(1000)
    hub.learner.put(hub.store, (1, 0))
    stage = WholeVersion(hub.learner.encode(1, 0).manifest, layout=LAYOUT, base=hub.learner.versions[0])
    fetcher = await hub.fetcher(Registry())
    with pytest.raises(DamagedFrameError) as damaged:
        await fetcher.fetch(await fetcher.manifest(DELTA), [2], stage.put)
    assert damaged.value.frame == 2
    assert [list(request.frames) for request in hub.servicer.fetches] == [[2], [2], [2]]


@large
async def test_a_cut_within_a_frame_goes_on_at_the_byte_where_it_happened(hub: PolicyHub) -> None:
    async def cut_after_one(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            yield answer
            if number == 1:
                return

    hub.servicer.spoil = cut_after_one
    registry = Registry()
    await arrives(hub, await hub.fetcher(registry, streams=1), None)
    assert [request.first_offset_bytes for request in hub.servicer.fetches] == [0, limits.CHUNK_BYTES]
    assert registry.transferred("keyframe", "in") == hub.learner.encode(1, None).manifest.size_bytes
    assert registry.value("heterorl_node_frames_applied_total", codec="keyframe") == 2
    assert registry.value("heterorl_node_fetch_seconds_count", kind="keyframe") == 1


@large
async def test_a_fetch_that_is_wound_up_finishes_the_frames_begun_and_asks_for_no_other(
    hub: PolicyHub,
) -> None:
    go_on = asyncio.Event()

    async def wait(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            await go_on.wait()
            yield answer

    hub.learner.put(hub.store, (1, None))
    hub.servicer.spoil = wait
    fetcher = await hub.fetcher(Registry(), streams=2, part_bytes=limits.CHUNK_BYTES)
    manifest, got = await fetcher.manifest(ArtifactKey(1)), set[int]()
    fetching = asyncio.create_task(fetcher.fetch(manifest, range(2), lambda frame, _: got.add(frame)))
    await until(lambda: len(hub.servicer.fetches) == 2)
    fetcher.wind_up()
    go_on.set()
    assert not await fetching
    assert got == {frame for request in hub.servicer.fetches for frame in request.frames}
    assert await fetcher.fetch(manifest, set(range(2)) - got, lambda frame, _: got.add(frame))
    assert got == {0, 1}


async def test_any_number_of_cuts_is_survived_as_long_as_bytes_arrive(hub: PolicyHub) -> None:
    async def cut_after_one(number: int, answers: Answers) -> Answers:
        yield await anext(answers)

    hub.servicer.spoil = cut_after_one
    await arrives(hub, await hub.fetcher(Registry(), streams=1, attempts=2), 0)
    assert len(hub.servicer.fetches) == 5


async def test_a_hub_that_only_lies_is_given_up(hub: PolicyHub) -> None:
    async def lie_always(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            answer.offset_bytes += 1
            yield answer

    hub.servicer.spoil = lie_always
    with pytest.raises(ConnectionLost, match="was due"):
        await arrives(hub, await hub.fetcher(Registry(), attempts=4, streams=1), 0)
    assert len(hub.servicer.fetches) == 4


async def test_a_stream_without_progress_is_cut_and_begun_again(hub: PolicyHub) -> None:
    async def stall_once(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            if number == 1 and answer.frame == 2:
                await asyncio.Event().wait()
            yield answer

    hub.servicer.spoil = stall_once
    await arrives(hub, await hub.fetcher(Registry(), streams=1, stall_s=0.2), 0)
    assert list(hub.servicer.fetches[1].frames) == [2, 3, 4]


async def test_a_hub_cannot_serve_what_another_learner_signed(made: MadeRun, tmp_path: Path) -> None:
    stranger = Learner(run_id=made.run_id, key=SigningKey.generate())
    async with policy_hub(made, tmp_path / "hub", learner=stranger) as hub:
        stranger.put(hub.store, (1, 0))
        with refused(Reason.BAD_SIGNATURE):
            await (await hub.fetcher(Registry())).manifest(DELTA)


async def test_a_hub_cannot_serve_one_version_as_another(
    hub: PolicyHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.learner.put(hub.store, (1, 0))
    real = hub.store.manifest(DELTA)
    monkeypatch.setattr(hub.store, "manifest", lambda key: real)
    with refused(Reason.MALFORMED):
        await (await hub.fetcher(Registry())).manifest(ArtifactKey(2, 1))


async def test_a_version_the_hub_no_longer_has_is_not_waited_for(hub: PolicyHub) -> None:
    fetcher = await hub.fetcher(Registry())
    manifest = hub.learner.encode(1, 0).manifest
    for fetching in (fetcher.manifest(DELTA), fetcher.fetch(manifest, [0], lambda *_: None)):
        with refused(Reason.UNKNOWN_VERSION):
            await fetching
