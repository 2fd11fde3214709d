"""Relays between a hub and its samplers: they carry what they cannot forge, and losing one costs little."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.held_policy import HeldPolicy
from heterorl.v1 import policy_pb2
from node.values.policy import ArtifactKey
from node.weights.format.layout import Layout, TensorSpec
from node.weights.transfer.sources import Sources
from support.fetching import fetch_version
from support.identity import MadeRun
from support.policy_hub import (
    Answers,
    PolicyHub,
    Registry,
    make_fetcher,
    make_sources,
    policy_hub,
    policy_hub_fixture,
)
from support.relay import running_relay
from support.uploading import uploading
from support.waiting import until
from support.whole_version import WholeVersion

DELTA = ArtifactKey(1, 0)
KEYFRAME = ArtifactKey(1)
SAMPLERS = 16
WIDE = Layout.of([TensorSpec("a", (40 * 4096,)), TensorSpec("b", (10,))], frame_words=4096)
"""A keyframe is 41 frames, a quarter of a megabyte."""


hub = policy_hub_fixture(WIDE)


@pytest.fixture
async def spoilt(hub: PolicyHub, made: MadeRun, tmp_path: Path) -> AsyncIterator[PolicyHub]:
    """Return a hub that has the keyframe of version 1 as ``hub`` has, for a test to spoil."""
    async with policy_hub(made, tmp_path / "spoilt", layout=WIDE, learner=hub.learner) as spoilt:
        for each in (hub, spoilt):
            each.learner.put(each.store, (1, None))
        yield spoilt


async def fetch(
    hub: PolicyHub, sources: Sources, registry: Registry, key: ArtifactKey, **limits: Any
) -> HeldPolicy:
    """Fetch one artifact on version 0."""
    fetcher = make_fetcher(hub.made, sources, registry, **limits)
    return await fetch_version(
        fetcher,
        await fetcher.manifest(key),
        layout=hub.learner.layout,
        held=None if key.is_keyframe else hub.learner.versions[0],
    )


async def announced(sources: Sources, version: int) -> None:
    async with asyncio.timeout(10):
        async for announcement in sources.announcements():
            if announcement.head.number == version:
                return


async def offered(sources: Sources, key: ArtifactKey) -> None:
    async with asyncio.timeout(10):
        async for announcement in sources.announcements():
            if key in {artifact.key for artifact in announcement.artifacts}:
                return


def size_bytes(hub: PolicyHub, version: int, base: int | None) -> int:
    return hub.learner.encode(version, base).manifest.size_bytes


async def test_a_relay_that_starts_late_refuses_nothing_of_what_its_hub_retains(
    hub: PolicyHub, made: MadeRun, tmp_path: Path
) -> None:
    # A relay begins with the cheapest way to the head; the keyframe is behind its head by then.
    hub.learner.put(hub.store, (1, None), (2, 1), (3, 2), (4, 0), (4, 3))
    for head in (4, 5):  # a fresh one, and the same one started again
        async with running_relay(made, tmp_path / "relay", coordinator=hub.serving.address) as relay:
            # The delta comes last of all that a relay copies.
            await offered(make_sources(Registry(), relay.source()), ArtifactKey(head, head - 1))
            refused = {"service": "PolicyService", "reason": "rollback"}
            assert relay.registry.value("heterorl_node_refusals_total", **refused) == 0
        hub.learner.put(hub.store, (5, 0), (5, 4))


async def test_learner_and_hub_send_one_copy_each_however_many_samplers_are_behind_the_relay(
    hub: PolicyHub, made: MadeRun, tmp_path: Path
) -> None:
    published = hub.learner.store(tmp_path / "published")
    async with running_relay(made, tmp_path / "relay", coordinator=hub.serving.address) as relay:

        async def sampler() -> HeldPolicy:
            registry = Registry()
            sources = make_sources(registry, relay.source(), last_resort=await hub.source())
            await announced(sources, 1)
            return await fetch(hub, sources, registry, DELTA)

        samplers = [asyncio.create_task(sampler()) for _ in range(SAMPLERS)]
        async with uploading(made, published, hub.serving.address) as uplink:
            await asyncio.to_thread(hub.learner.put, published, (1, 0))
            for held in await asyncio.gather(*samplers):
                np.testing.assert_array_equal(held.words, hub.learner.words(1))
        one_copy = size_bytes(hub, 1, 0)
        assert one_copy <= uplink.transferred("delta", "out") <= 1.1 * one_copy
        assert one_copy <= hub.registry.transferred("delta", "out") <= 1.1 * one_copy
        assert relay.registry.transferred("delta", "out") >= SAMPLERS * one_copy


async def test_three_relays_deep_frames_are_passed_on_before_the_artifact_is_whole(
    hub: PolicyHub, made: MadeRun, tmp_path: Path
) -> None:
    go_on = asyncio.Event()
    frames_sent = 0

    async def half(number: int, answers: Answers) -> Answers:
        nonlocal frames_sent
        async for answer in answers:
            if frames_sent == 20:
                await go_on.wait()
            else:
                frames_sent += 1
            yield answer

    hub.servicer.spoil = half
    upstream: list[str] = []
    async with AsyncExitStack() as stack:
        for name in ("relay-1", "relay-2", "relay-3"):
            coordinator = upstream[0] if upstream else hub.serving.address
            relay = await stack.enter_async_context(
                running_relay(made, tmp_path / name, coordinator=coordinator, name=name, upstream=upstream)
            )
            upstream = [relay.address]
        registry = Registry()
        sources = make_sources(registry, relay.source())
        await asyncio.to_thread(hub.learner.put, hub.store, (1, None))
        await announced(sources, 1)
        fetcher = make_fetcher(made, sources, registry, streams=8)
        manifest = await fetcher.manifest(KEYFRAME)
        stage = WholeVersion(manifest, layout=WIDE, base=None)
        fetching = asyncio.create_task(fetcher.fetch(manifest, stage.missing(), stage.put))
        await until(lambda: len(stage.missing()) <= 21)
        assert not fetching.done()
        go_on.set()
        await fetching
        assert stage.finish().version == hub.learner.versions[1].version
        assert hub.registry.transferred("keyframe", "out") == size_bytes(hub, 1, None)


async def test_a_cut_at_nine_tenths_is_finished_through_another_relay_with_little_sent_again(
    hub: PolicyHub, spoilt: PolicyHub, made: MadeRun, tmp_path: Path
) -> None:
    registry, whole_bytes = Registry(), size_bytes(hub, 1, None)

    async def cut_late(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            if registry.transferred("keyframe", "in") > 0.9 * whole_bytes:
                spoilt.serving.stopping.set()
                return
            yield answer

    spoilt.servicer.spoil = cut_late
    async with running_relay(made, tmp_path / "relay", coordinator=hub.serving.address) as relay:
        first, second = await spoilt.source(), relay.source()
        await announced(make_sources(Registry(), second), 1)
        # Nothing was heard of the second yet: all of it is asked of the first until that is cut.
        await announced(make_sources(registry, first), 1)
        held = await fetch(hub, make_sources(registry, first, second), registry, KEYFRAME)
        assert held.version == hub.learner.versions[1].version
        assert registry.transferred("keyframe", "in") <= 1.12 * whole_bytes
        assert relay.registry.transferred("keyframe", "out") > 0


async def _drip(number: int, answers: Answers) -> Answers:
    async for answer in answers:
        await asyncio.sleep(0.5)
        yield answer


async def _trickle(number: int, answers: Answers) -> Answers:
    async for answer in answers:
        for at in range(len(answer.data)):
            await asyncio.sleep(0.05)  # each byte is progress
            yield policy_pb2.FetchFramesResponse(
                frame=answer.frame, offset_bytes=answer.offset_bytes + at, data=answer.data[at : at + 1]
            )


@pytest.mark.parametrize(
    ("spoil", "limits", "fault"),
    [(_drip, {"slow_s": 0.2}, "slow"), (_trickle, {"stall_s": 0.5}, "lost")],
    ids=["frame by frame", "byte by byte"],
)
async def test_a_source_that_is_too_slow_is_set_aside_and_the_rest_comes_from_another(
    hub: PolicyHub,
    spoilt: PolicyHub,
    spoil: Callable[[int, Answers], Answers],
    limits: dict[str, float],
    fault: str,
) -> None:
    spoilt.servicer.spoil = spoil
    registry, whole_bytes = Registry(), size_bytes(hub, 1, None)
    sources = make_sources(registry, await spoilt.source(), await hub.source())
    held = await fetch(hub, sources, registry, KEYFRAME, streams=1, **limits)
    assert held.version == hub.learner.versions[1].version
    assert len(spoilt.servicer.fetches) == 1
    assert hub.registry.transferred("keyframe", "out") > whole_bytes / 2
    assert registry.transferred("keyframe", "in") == whole_bytes
    assert registry.value("heterorl_node_source_faults_total", fault=fault) == 1


async def _other_payloads(number: int, answers: Answers) -> Answers:
    async for answer in answers:
        answer.data = bytes(len(answer.data))
        yield answer


async def _other_frames(number: int, answers: Answers) -> Answers:
    async for answer in answers:
        answer.frame += 1
        yield answer


@pytest.mark.parametrize(("spoil", "fault"), [(_other_payloads, "damaged"), (_other_frames, "lied")])
async def test_a_relay_that_sends_other_content_is_set_aside_and_the_rest_comes_from_elsewhere(
    hub: PolicyHub, spoilt: PolicyHub, spoil: Callable[[int, Answers], Answers], fault: str
) -> None:
    spoilt.servicer.spoil = spoil
    registry = Registry()
    sources = make_sources(registry, await spoilt.source(), await hub.source())
    held = await fetch(hub, sources, registry, KEYFRAME)
    assert held.version == hub.learner.versions[1].version
    assert registry.value("heterorl_node_source_faults_total", fault=fault) >= 1
    asked = len(spoilt.servicer.fetches)
    await fetch(hub, sources, registry, KEYFRAME)
    assert len(spoilt.servicer.fetches) == asked


async def test_a_relay_serves_what_it_has_while_its_hub_is_away(made: MadeRun, tmp_path: Path) -> None:
    async def fetched() -> None:
        async with running_relay(made, tmp_path / "relay", coordinator=published.serving.address) as relay:
            registry = Registry()
            sources = make_sources(registry, relay.source())
            await announced(sources, 1)
            held = await fetch(published, sources, registry, DELTA)
            np.testing.assert_array_equal(held.words, published.learner.words(1))

    async with policy_hub(made, tmp_path / "hub") as published:
        published.learner.put(published.store, (1, 0))
        await fetched()
    await fetched()
