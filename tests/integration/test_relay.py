"""Relays between a hub and its samplers: they carry what they cannot forge, and losing one costs little."""

import asyncio
from collections.abc import Callable
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
from support.policy_hub import Answers, PolicyHub, Registry, make_fetcher, make_sources, policy_hub
from support.relay import RunningRelay, running_relay
from support.uploading import uploading
from support.waiting import until
from support.whole_version import WholeVersion

DELTA = ArtifactKey(1, 0)
KEYFRAME = ArtifactKey(1)
WIDE = Layout.of([TensorSpec("a", (40 * 4096,)), TensorSpec("b", (10,))], frame_words=4096)
"""A keyframe is 41 frames, a quarter of a megabyte."""


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


async def test_a_relay_announces_and_serves_what_its_hub_published(made: MadeRun, tmp_path: Path) -> None:
    async with (
        policy_hub(made, tmp_path / "hub") as hub,
        running_relay(made, tmp_path / "relay", coordinator=hub.serving.address) as relay,
    ):
        registry = Registry()
        sources = make_sources(registry, relay.source())
        hub.learner.put(hub.store, (1, 0), (2, 1))
        await announced(sources, 2)
        held = await fetch(hub, sources, registry, DELTA)
        np.testing.assert_array_equal(held.words, hub.learner.words(1))


async def test_a_relay_that_starts_late_refuses_nothing_of_what_its_hub_retains(
    made: MadeRun, tmp_path: Path
) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub:
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
    made: MadeRun, tmp_path: Path
) -> None:
    async with (
        policy_hub(made, tmp_path / "hub", layout=WIDE) as hub,
        running_relay(made, tmp_path / "relay", coordinator=hub.serving.address) as relay,
    ):
        published = hub.learner.store(tmp_path / "published")

        async def sampler() -> HeldPolicy:
            registry = Registry()
            sources = make_sources(registry, relay.source(), last_resort=await hub.source())
            await announced(sources, 1)
            return await fetch(hub, sources, registry, DELTA)

        samplers = [asyncio.create_task(sampler()) for _ in range(32)]
        async with uploading(made, published, hub.serving.address) as uplink:
            await asyncio.to_thread(hub.learner.put, published, (1, 0))
            for held in await asyncio.gather(*samplers):
                np.testing.assert_array_equal(held.words, hub.learner.words(1))
        one_copy = size_bytes(hub, 1, 0)
        assert one_copy <= uplink.transferred("delta", "out") <= 1.1 * one_copy
        assert one_copy <= hub.registry.transferred("delta", "out") <= 1.1 * one_copy
        assert relay.registry.transferred("delta", "out") >= 32 * one_copy


async def test_three_relays_deep_frames_are_passed_on_before_the_artifact_is_whole(
    made: MadeRun, tmp_path: Path
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

    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(policy_hub(made, tmp_path / "hub", layout=WIDE))
        hub.servicer.spoil = half
        above = hub.serving.address
        relays: list[RunningRelay] = []
        for name in ("relay-1", "relay-2", "relay-3"):
            upstream = [above] if relays else []
            relays.append(
                await stack.enter_async_context(
                    running_relay(made, tmp_path / name, coordinator=above, name=name, upstream=upstream)
                )
            )
            above = relays[-1].address
        registry = Registry()
        sources = make_sources(registry, relays[-1].source())
        await asyncio.to_thread(hub.learner.put, hub.store, (1, None))
        await announced(sources, 1)
        fetcher = make_fetcher(made, sources, registry, streams=8)
        stage = WholeVersion(await fetcher.manifest(KEYFRAME), layout=WIDE, base=None)
        fetching = asyncio.create_task(
            fetcher.fetch(await fetcher.manifest(KEYFRAME), stage.missing(), stage.put)
        )
        await until(lambda: len(stage.missing()) <= 21)
        assert not fetching.done()
        go_on.set()
        await fetching
        assert stage.finish().version == hub.learner.versions[1].version
        assert hub.registry.transferred("keyframe", "out") == size_bytes(hub, 1, None)


async def test_a_cut_at_nine_tenths_is_finished_through_another_relay_with_little_sent_again(
    made: MadeRun, tmp_path: Path
) -> None:
    async with (
        policy_hub(made, tmp_path / "hub", layout=WIDE) as hub,
        policy_hub(made, tmp_path / "one", layout=WIDE, learner=hub.learner) as cut,
        running_relay(made, tmp_path / "two", coordinator=hub.serving.address) as whole,
    ):
        whole_bytes = size_bytes(hub, 1, None)
        hub.learner.put(hub.store, (1, None))
        hub.learner.put(cut.store, (1, None))
        registry = Registry()

        async def cut_late(number: int, answers: Answers) -> Answers:
            async for answer in answers:
                if registry.transferred("keyframe", "in") > 0.9 * whole_bytes:
                    cut.serving.stopping.set()
                    return
                yield answer

        cut.servicer.spoil = cut_late
        first, second = await cut.source(), whole.source()
        await announced(make_sources(Registry(), second), 1)
        sources = make_sources(registry, first, second)
        # Nothing was heard of the second yet: all of it is asked of the first until that is cut.
        listening = asyncio.create_task(announced(make_sources(registry, first), 1))
        await listening
        held = await fetch(hub, sources, registry, KEYFRAME)
        assert held.version == hub.learner.versions[1].version
        assert registry.transferred("keyframe", "in") <= 1.12 * whole_bytes
        assert whole.registry.transferred("keyframe", "out") > 0


async def test_a_dripping_source_is_set_aside_and_the_rest_comes_from_another(
    made: MadeRun, tmp_path: Path
) -> None:
    dripped = 0

    async def drip(number: int, answers: Answers) -> Answers:
        nonlocal dripped
        async for answer in answers:
            await asyncio.sleep(0.5)
            dripped += 1
            yield answer

    async with (
        policy_hub(made, tmp_path / "hub", layout=WIDE) as hub,
        policy_hub(made, tmp_path / "slow", layout=WIDE, learner=hub.learner) as slow,
    ):
        hub.learner.put(hub.store, (1, None))
        hub.learner.put(slow.store, (1, None))
        slow.servicer.spoil = drip
        registry = Registry()
        sources = make_sources(registry, await slow.source(), await hub.source())
        held = await fetch(hub, sources, registry, KEYFRAME, streams=1, slow_s=0.2)
        assert held.version == hub.learner.versions[1].version
        assert len(slow.servicer.fetches) == 1
        # One range of each of its lanes, of 16 KiB: three frames of 200.
        assert dripped < 20
        assert registry.transferred("keyframe", "in") == size_bytes(hub, 1, None)
        assert registry.value("heterorl_node_source_faults_total", fault="slow") == 1


async def test_a_source_that_stops_within_a_range_is_left_for_another(made: MadeRun, tmp_path: Path) -> None:
    async def trickle(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            for at in range(len(answer.data)):
                await asyncio.sleep(0.05)  # each byte is progress
                yield policy_pb2.FetchFramesResponse(
                    frame=answer.frame, offset_bytes=answer.offset_bytes + at, data=answer.data[at : at + 1]
                )

    async with (
        policy_hub(made, tmp_path / "hub", layout=WIDE) as hub,
        policy_hub(made, tmp_path / "slow", layout=WIDE, learner=hub.learner) as slow,
    ):
        hub.learner.put(hub.store, (1, None))
        hub.learner.put(slow.store, (1, None))
        slow.servicer.spoil = trickle
        registry = Registry()
        sources = make_sources(registry, await slow.source(), await hub.source())
        held = await fetch(hub, sources, registry, KEYFRAME, streams=1, stall_s=0.5)
        assert held.version == hub.learner.versions[1].version
        assert len(slow.servicer.fetches) == 1
        assert registry.transferred("keyframe", "in") == size_bytes(hub, 1, None)
        assert registry.value("heterorl_node_source_faults_total", fault="lost") == 1


def _other_payload(answer: policy_pb2.FetchFramesResponse) -> policy_pb2.FetchFramesResponse:
    answer.data = bytes(len(answer.data))
    return answer


def _other_frame(answer: policy_pb2.FetchFramesResponse) -> policy_pb2.FetchFramesResponse:
    answer.frame += 1
    return answer


@pytest.mark.parametrize(("lie", "fault"), [(_other_payload, "damaged"), (_other_frame, "lied")])
async def test_a_relay_that_sends_other_content_is_set_aside_and_the_rest_comes_from_elsewhere(
    made: MadeRun,
    tmp_path: Path,
    lie: Callable[[policy_pb2.FetchFramesResponse], policy_pb2.FetchFramesResponse],
    fault: str,
) -> None:
    async def lying(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            yield lie(answer)

    async with (
        policy_hub(made, tmp_path / "hub", layout=WIDE) as hub,
        policy_hub(made, tmp_path / "liar", layout=WIDE, learner=hub.learner) as liar,
    ):
        hub.learner.put(hub.store, (1, None))
        hub.learner.put(liar.store, (1, None))
        liar.servicer.spoil = lying
        registry = Registry()
        sources = make_sources(registry, await liar.source(), await hub.source())
        held = await fetch(hub, sources, registry, KEYFRAME)
        assert held.version == hub.learner.versions[1].version
        assert registry.value("heterorl_node_source_faults_total", fault=fault) >= 1
        asked = len(liar.servicer.fetches)
        await fetch(hub, sources, registry, KEYFRAME)
        assert len(liar.servicer.fetches) == asked


async def test_a_relay_serves_what_it_has_while_its_hub_is_away(made: MadeRun, tmp_path: Path) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0))
        address = hub.serving.address
        async with running_relay(made, tmp_path / "relay", coordinator=address) as relay:
            registry = Registry()
            sources = make_sources(registry, relay.source())
            await announced(sources, 1)
            await fetch(hub, sources, registry, DELTA)
    async with running_relay(made, tmp_path / "relay", coordinator=address) as relay:
        registry = Registry()
        sources = make_sources(registry, relay.source())
        await announced(sources, 1)
        held = await fetch(hub, sources, registry, DELTA)
        assert held.version == hub.learner.versions[1].version
