"""Versions asked for before they exist: they come by themselves, and nothing is believed for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bench.held_policy import HeldPolicy
from heterorl.v1 import policy_pb2
from node.identity.signatures import SigningKey
from node.values import limits
from node.values.policy import ArtifactKey
from node.weights.format.layout import Layout, TensorSpec
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.payload_order import pushed_frames
from sampler.versions.way_to_head import FetchPlan
from support.fetching import fetch_version
from support.identity import MadeRun
from support.policy_hub import PolicyHub, Pushes, Pushing, Registry, make_fetcher, make_sources, policy_hub
from support.relay import running_relay
from support.waiting import until
from support.weights import Learner

STEP = ArtifactKey(1, 0)
STEP_OF_LEARNER = (1, 0)
WIDE = Layout.of([TensorSpec("a", (40 * 4096,)), TensorSpec("b", (10,))], frame_words=4096)
"""41 frames."""


@dataclass(slots=True)
class Expecting:
    """A sampler that asked for what comes after version 0."""

    hub: PolicyHub
    fetcher: Fetcher
    registry: Registry
    tasks: asyncio.TaskGroup

    @property
    def lies(self) -> float:
        return self.registry.value("heterorl_node_source_faults_total", fault="lied")

    async def chosen(self) -> ArtifactKey:
        """Return what to fetch once something is announced."""

        async def look() -> FetchPlan:
            return FetchPlan(self.hub.learner.versions[0].version, self.hub.store.announcement())

        artifact = await self.fetcher.next_artifact(look, self.tasks)
        assert artifact is not None
        return artifact.key

    async def fetch(self, key: ArtifactKey | None = None) -> HeldPolicy:
        """Fetch what is chosen, or an artifact by name."""
        return await fetch_version(
            self.fetcher,
            await self.fetcher.manifest(key or await self.chosen()),
            layout=WIDE,
            held=self.hub.learner.versions[0],
        )


@asynccontextmanager
async def expecting(hub: PolicyHub) -> AsyncIterator[Expecting]:
    registry = Registry()
    fetcher = await hub.fetcher(registry)
    async with expected(fetcher) as tasks:
        await until(lambda: hub.servicer.awaited == [0])
        yield Expecting(hub, fetcher, registry, tasks)


@asynccontextmanager
async def expected(fetcher: Fetcher) -> AsyncIterator[asyncio.TaskGroup]:
    """Expect what comes after version 0 until the body ends."""
    begun = asyncio.get_running_loop().create_future()

    async def expect() -> None:
        async with asyncio.TaskGroup() as tasks:
            fetcher.prefetch(0, tasks)
            begun.set_result(tasks)
            await asyncio.Event().wait()

    expecting = asyncio.create_task(expect())
    try:
        yield await begun
    finally:
        expecting.cancel()
        await asyncio.wait({expecting})


@pytest.fixture
async def hub(made: MadeRun, tmp_path: Path) -> AsyncIterator[PolicyHub]:
    async with policy_hub(made, tmp_path / "hub", layout=WIDE) as hub:
        hub.servicer.pushes = Pushing.PUSHES
        yield hub


async def test_a_step_asked_for_in_advance_comes_without_another_request(hub: PolicyHub) -> None:
    sampler = await stepped(hub)
    assert asked_for(hub) == []
    assert sampler.registry.transferred("delta", "in") == hub.learner.encode(1, 0).manifest.size_bytes


async def stepped(hub: PolicyHub) -> Expecting:
    """Publish a step to a sampler that expects it; return the sampler once it has the step's words."""
    async with expecting(hub) as sampler:
        hub.learner.put(hub.store, STEP_OF_LEARNER)
        held = await sampler.fetch()
    np.testing.assert_array_equal(held.words, hub.learner.words(1))
    return sampler


def asked_for(hub: PolicyHub) -> list[int]:
    """Return the frames that were not pushed but fetched."""
    return sorted(frame for fetch in hub.servicer.fetches for frame in fetch.frames)


async def test_who_is_behind_gets_the_first_artifact_of_the_cheapest_way(hub: PolicyHub) -> None:
    hub.learner.put(hub.store, (1, None), (2, 1), (2, 0))
    async with expecting(hub) as sampler:
        held = await sampler.fetch()
    assert held.version == hub.learner.versions[2].version
    assert hub.servicer.fetches == []


async def test_only_so_much_is_pushed_and_the_rest_is_fetched(
    hub: PolicyHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PUSH_BYTES", 2_000)
    sampler = await stepped(hub)
    manifest = hub.learner.encode(1, 0).manifest
    assert asked_for(hub) == sorted({*range(40)} - {*pushed_frames(manifest, most_bytes=2_000)})
    assert 0 < len(asked_for(hub)) < 40
    assert sampler.registry.transferred("delta", "in") == manifest.size_bytes


async def test_a_push_that_is_cut_is_gone_on_with_where_it_stopped(hub: PolicyHub) -> None:
    async def cut(answers: Pushes) -> Pushes:
        number = 0
        async for answer in answers:
            if number == 11:  # the manifest and ten frames
                return
            number += 1
            yield answer

    hub.servicer.spoil_push = cut
    await stepped(hub)
    pushed = pushed_frames(hub.learner.encode(1, 0).manifest, most_bytes=limits.PUSH_BYTES)
    assert asked_for(hub) == sorted(pushed[10:])


async def test_a_pushed_frame_that_is_damaged_is_fetched_again_alone(hub: PolicyHub) -> None:
    async def damage(answers: Pushes) -> Pushes:
        async for answer in answers:
            if answer.frame == 7 and answer.data:
                answer.data = bytes([answer.data[0] ^ 1]) + answer.data[1:]
            yield answer

    hub.servicer.spoil_push = damage
    await stepped(hub)
    assert asked_for(hub) == [7]


async def _forged(answers: Pushes) -> Pushes:
    async for answer in answers:
        if answer.signed_manifest:
            answer.signed_manifest = answer.signed_manifest[:-1] + b"x"
        yield answer


async def _of_another_learner(answers: Pushes) -> Pushes:
    signed, _ = Learner(layout=WIDE, key=SigningKey.generate()).signed(1, 0)
    async for answer in answers:
        if answer.signed_manifest:
            answer.signed_manifest = signed
        yield answer


async def _empty(answers: Pushes) -> Pushes:
    async for _ in answers:
        yield policy_pb2.AwaitArtifactResponse()


@pytest.mark.parametrize("spoil", [_forged, _of_another_learner, _empty])
async def test_a_push_that_is_not_signed_by_the_learner_is_refused_and_the_version_fetched(
    hub: PolicyHub, spoil: object
) -> None:
    hub.servicer.spoil_push = spoil  # type: ignore[assignment]
    async with expecting(hub) as sampler:
        hub.learner.put(hub.store, STEP_OF_LEARNER)
        await until(lambda: sampler.lies == 1)
        held = await sampler.fetch(STEP)
    assert held.version == hub.learner.versions[1].version
    assert sampler.lies == 1


async def test_what_a_hub_never_sends_is_fetched_after_a_while(
    hub: PolicyHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.weights.transfer.artifact_prefetch.PATIENCE_S", 0.1)
    hub.servicer.pushes = Pushing.SILENT
    sampler = await stepped(hub)
    assert sampler.lies == 0


async def test_a_push_of_another_artifact_than_wanted_is_dropped(hub: PolicyHub) -> None:
    async with expecting(hub) as sampler:
        hub.learner.put(hub.store, (1, 0), (2, 1), (2, None))
        held = await sampler.fetch(ArtifactKey(2))
        assert held.version == hub.learner.versions[2].version
        assert asked_for(hub) == list(range(40))


async def test_a_frame_wanted_alone_is_not_taken_from_a_push(hub: PolicyHub) -> None:
    async with expecting(hub) as sampler:
        hub.learner.put(hub.store, STEP_OF_LEARNER)
        manifest = await sampler.fetcher.manifest(await sampler.chosen())
        got: list[int] = []
        await sampler.fetcher.fetch(manifest, [3], lambda frame, payload: got.append(frame))
        assert got == [3]


async def test_a_hub_that_restarts_is_asked_again(hub: PolicyHub, made: MadeRun, tmp_path: Path) -> None:
    registry = Registry()
    fetcher = await hub.fetcher(registry)
    async with expected(fetcher) as tasks:
        await until(lambda: hub.servicer.awaited == [0])
        hub.serving.stopping.set()
        await hub.serving.running
        listen = hub.serving.address
        async with policy_hub(made, tmp_path / "again", layout=WIDE, listen=listen) as again:
            again.servicer.pushes = Pushing.PUSHES
            await until(lambda: again.servicer.awaited != [])
            again.learner.put(again.store, STEP_OF_LEARNER)
            assert await Expecting(again, fetcher, registry, tasks).chosen() == STEP
            assert again.servicer.fetches == []


async def test_a_step_passes_a_relay_without_anybody_asking_for_a_frame(
    hub: PolicyHub, made: MadeRun, tmp_path: Path
) -> None:
    async with running_relay(made, tmp_path / "relay", coordinator=hub.serving.address) as relay:
        registry = Registry()
        fetcher = make_fetcher(made, make_sources(registry, relay.source()), registry)
        async with expected(fetcher) as tasks:
            await until(lambda: hub.servicer.awaited == [0])
            hub.learner.put(hub.store, STEP_OF_LEARNER)
            held = await Expecting(hub, fetcher, registry, tasks).fetch()
        np.testing.assert_array_equal(held.words, hub.learner.words(1))
        assert hub.servicer.fetches == []
        await until(lambda: hub.servicer.awaited[-1] == 1)


async def test_who_expects_nothing_any_more_is_forgotten(hub: PolicyHub) -> None:
    async with expecting(hub):
        await until(lambda: hub.serving.server.live_rpcs == 1)
    await until(lambda: hub.serving.server.live_rpcs == 0)
