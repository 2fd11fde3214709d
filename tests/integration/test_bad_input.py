"""Data from a hub or a relay that was never signed: named, counted, never served; the rest is kept."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard

from heterorl.v1 import policy_pb2
from node.errors import Reason
from node.identity.signatures import SigningKey
from node.values.policy import ArtifactKey
from node.weights.format.digests import payload_digest
from node.weights.format.layout import Layout
from node.weights.format.manifest import Codec, Manifest, sign
from node.weights.store.readers import LINGER_S
from support.fetching import fetch_version
from support.identity import MadeRun
from support.policy_hub import Answers, Registry, policy_hub
from support.policy_sync import syncing
from support.waiting import until
from support.weights import LAYOUT, SPECS, Learner, keys, put_version

DELTA = ArtifactKey(1, 0)
Lie = Callable[[Learner], bytes]


MANIFESTS: dict[str, tuple[Lie, Reason]] = {
    "signed by a stranger": (
        lambda learner: replace(learner, key=SigningKey.generate()).signed(2, 1)[0],
        Reason.BAD_SIGNATURE,
    ),
    "of another run": (
        lambda learner: replace(learner, run_id="another-run").signed(2, 1)[0],
        Reason.FOREIGN_RUN,
    ),
    "replayed: of an older version": (lambda learner: learner.signed(1, 0)[0], Reason.MALFORMED),
    "of the same version from another base": (lambda learner: learner.signed(2, 0)[0], Reason.MALFORMED),
    "cut to nothing": (lambda learner: b"", Reason.BAD_SIGNATURE),
    "too long to read": (lambda learner: bytes((4 << 20) - 1000), Reason.BAD_SIGNATURE),
}


@pytest.mark.parametrize("name", MANIFESTS)
async def test_a_manifest_that_is_not_the_one_signed_is_refused_and_the_version_held_is_served(
    made: MadeRun, tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Another one is given out where that of version 2 is asked for."""
    lie, reason = MANIFESTS[name]
    async with policy_hub(made, tmp_path / "hub") as hub:
        honest, signed = hub.store.manifest, lie(hub.learner)

        def manifest(key: ArtifactKey) -> Manifest:
            return replace(honest(key), signed=signed) if key.version == 2 else honest(key)

        hub.learner.put(hub.store, (1, 0))
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[1])
            with monkeypatch.context() as patched:
                patched.setattr(hub.store, "manifest", manifest)
                await asyncio.to_thread(hub.learner.put, hub.store, (2, 1))
                await until(lambda: serving.refusals[reason] >= 1)
                assert serving.numbers == [0, 1]
                assert set(serving.refusals) == {reason}
            await serving.reaches(hub.learner.versions[2])


async def test_a_version_of_another_layout_is_refused_and_the_next_of_the_right_one_is_taken(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    other = Learner(Layout.of(SPECS, frame_words=512), run_id=made.run_id, key=made.signing_key)
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0))
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[1])
            await asyncio.to_thread(other.put, hub.store, (2, None))
            await until(lambda: serving.refusals[Reason.LAYOUT_MISMATCH] >= 1)
            assert serving.numbers == [0, 1]
            await asyncio.to_thread(hub.learner.put, hub.store, (3, 1))
            await serving.reaches(hub.learner.versions[3])


@pytest.mark.parametrize("codec", [Codec.STEP_PLANES, Codec.KEYFRAME])
async def test_a_decompression_bomb_is_refused_before_it_goes_off_though_the_learner_signed_it(
    made: MadeRun, tmp_path: Path, state_dir: Path, codec: Codec
) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub:
        encoded = hub.learner.encode(1, 0)
        zeros = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 22))
        bomb = (bytes(LAYOUT.frames[2].words) if codec is Codec.KEYFRAME else b"") + zeros
        assert len(bomb) < 2 * LAYOUT.frames[2].words
        frames = list(encoded.manifest.frames)
        frames[2] = replace(
            frames[2], codec=codec, payload_bytes=len(bomb), payload_digest=payload_digest(bomb)
        )
        payloads = [*encoded.payloads[:2], bomb, *encoded.payloads[3:]]
        signed = sign(replace(encoded.manifest, frames=tuple(frames)), made.signing_key)
        put_version(hub.store, signed, payloads)
        async with syncing(hub, state_dir) as serving:
            # With a base, what is held may be at fault for all that a sampler can tell.
            reason = Reason.WRONG_BASE if codec.needs_base else Reason.DAMAGED
            await until(lambda: serving.refusals[reason] >= 1)
            assert set(serving.numbers) == {0}
            damaged = serving.registry.value("heterorl_node_frames_damaged_total")
            assert damaged == 0 if codec.needs_base else damaged >= 3
            good = [frame for frame in range(5) if frame != 2]
            asked = [frame for fetch in hub.servicer.fetches for frame in fetch.frames]
            # What was good was kept: only the bomb is asked for again.
            assert [asked.count(frame) for frame in good] == [1, 1, 1, 1]
            await asyncio.to_thread(hub.learner.put, hub.store, (2, 0))
            await serving.reaches(hub.learner.versions[2])


async def _replayed(number: int, answers: Answers) -> Answers:
    async for answer in answers:
        yield answer
        if number == 1:
            yield answer


async def _reordered(number: int, answers: Answers) -> Answers:
    early: list[policy_pb2.FetchFramesResponse] = []
    async for answer in answers:
        early.append(answer)
        if number > 1 or len(early) == 5:
            for each in reversed(early):
                yield each
            early.clear()


@pytest.mark.parametrize(
    ("spoil", "kept"),
    [(_replayed, [0]), (_reordered, [])],
    ids=["replayed", "reordered"],
)
async def test_a_stream_that_is_not_what_was_asked_for_is_left_and_what_came_before_is_kept(
    made: MadeRun,
    tmp_path: Path,
    spoil: Callable[[int, Answers], Answers],
    kept: list[int],
) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0))
        hub.servicer.spoil = spoil
        registry = Registry()
        fetcher = await hub.fetcher(registry, streams=1)
        held = await fetch_version(
            fetcher,
            await fetcher.manifest(DELTA),
            layout=LAYOUT,
            held=hub.learner.versions[0],
        )
        np.testing.assert_array_equal(held.words, hub.learner.words(1))
        first, second = hub.servicer.fetches
        assert list(first.frames) == [0, 1, 2, 3, 4]
        assert list(second.frames) == [frame for frame in range(5) if frame not in kept]
        # At most the piece that was wrong came for nothing.
        payloads = hub.learner.encode(1, 0).payloads
        assert registry.transferred("delta", "in") <= sum(map(len, payloads)) + max(map(len, payloads))


async def test_the_cleaner_leaves_what_is_being_read_until_it_was_read(made: MadeRun, tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def halting(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            if answer.frame == 2:
                await go_on.wait()
            yield answer

    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, None), (2, 1))
        hub.servicer.spoil = halting
        fetcher, got = await hub.fetcher(Registry(), streams=1), dict[int, bytes]()
        manifest = await fetcher.manifest(ArtifactKey(2, 1))
        fetching = asyncio.create_task(fetcher.fetch(manifest, range(5), got.__setitem__))
        await until(lambda: len(got) == 2)
        await asyncio.to_thread(hub.learner.put, hub.store, (3, None), (4, None))
        assert keys(hub.store) == [(2, 1), (3, -1), (4, -1)]
        go_on.set()
        await fetching
        assert [got[frame] for frame in range(5)] == list(hub.learner.encode(2, 1).payloads)
        hub.clock.advance(LINGER_S)
        await asyncio.to_thread(hub.learner.put, hub.store, (5, 4))
        assert keys(hub.store) == [(3, -1), (4, -1), (5, 4)]


async def test_what_the_cleaner_took_before_it_was_asked_for_is_planned_around(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async def cut_and_cleaned(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            if hub.servicer.fetches[number - 1].key.version == 1 and answer.frame >= 2:
                await answers.aclose()  # nobody reads it any more, and nobody came back for it in time
                hub.clock.advance(LINGER_S)
                await asyncio.to_thread(hub.learner.put, hub.store, (2, None), (3, None))
                return
            yield answer

    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0))
        hub.servicer.spoil = cut_and_cleaned
        async with syncing(hub, state_dir) as serving:
            await until(lambda: 3 in hub.learner.versions)
            await serving.reaches(hub.learner.versions[3])
            # Version 2 may be taken before 3 is there; version 1 never is.
            assert serving.numbers in ([0, 3], [0, 2, 3])
            assert keys(hub.store) == [(2, -1), (3, -1)]
