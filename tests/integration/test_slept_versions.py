"""Samplers that slept for 1 to more than 1000 versions arrive by the cheapest way there is, bit for bit.

The versions are stored, coded over strides and dropped by the learner's own code, served by a real hub over
mutual TLS; each sampler starts on the disk that it would have.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from learner.config import LearnerConfig
from learner.publishing.further_artifacts import FurtherArtifacts
from learner.publishing.signer import Signer
from node.values.policy import Announcement, Artifact, ArtifactKey
from node.weights.assembly.stored import StoredVersions
from node.weights.format.layout import Layout, TensorSpec
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, plan_catch_up
from node.weights.store.artifact_store import ArtifactStore
from sampler.engines.words.model_words import ArrayWords
from sampler.versions.saved_policy import HELD_FILE
from sampler.versions.version_files import save_held
from support.identity import MadeRun, make_run
from support.policy_hub import PolicyHub, policy_hub
from support.policy_sync import IN_PLACE, syncing
from support.publishing import coder_of
from support.weights import Learner

TINY = Layout.of([TensorSpec("a", (16, 16)), TensorSpec("b", (70,))], frame_words=128)
HEAD = 272
"""Sixteen versions after a keyframe."""


@dataclass(frozen=True, slots=True)
class Published:
    """A run, its learner, and where the learner's store is."""

    made: MadeRun
    learner: Learner
    store_directory: Path


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    directory = tmp_path_factory.mktemp("learner")
    made = make_run(directory, now=time.time())
    learner = Learner(layout=TINY, run_id=made.run_id, key=made.signing_key)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        publish_all(learner, learner.store(directory / "published"))
    return Published(made, learner, directory / "published")


@asynccontextmanager
async def supplied_hub(published: Published) -> AsyncIterator[tuple[PolicyHub, Announcement]]:
    """Run a hub that was given everything as it was made: it retains what the learner does."""
    directory = published.store_directory
    async with policy_hub(published.made, directory, layout=TINY, learner=published.learner) as hub:
        announcement = hub.store.announcement()
        assert announcement is not None
        assert announcement.head == published.learner.versions[HEAD].version
        yield hub, announcement


def publish_all(learner: Learner, store: ArtifactStore) -> None:
    """Publish HEAD versions as a learner does that is never short of time, with peers that far behind."""
    every = LearnerConfig.model_fields["keyframe_every_versions"].default
    signer = Signer(learner.key, learner.run_id, learner.epoch)
    further = FurtherArtifacts(
        StoredVersions(store, TINY, learner.words(0)),
        signer,
        keyframe_every_versions=every,
        public_delta_every_versions=LearnerConfig.model_fields["public_delta_every_versions"].default,
        longest_lag_versions=lambda: HEAD,
    )
    for version in range(1, HEAD + 1):
        learner.put(store, (version, version - 1))
        if further.is_keyframe_due(version):
            learner.put(store, (version, None))
        while (key := further.next_delta(version)) is not None:
            coder, head = coder_of(learner.words(version), TINY), learner.versions[version].version
            further.make_delta(coder, head, key, is_superseded=lambda: False)


async def arrive(hub: PolicyHub, directory: Path, *, held: int) -> float:
    """Wake a sampler that fell asleep with version ``held`` (0: a new one), and give the bytes it fetches."""
    await asyncio.to_thread(directory.mkdir, parents=True)
    if held != PUBLIC_VERSION:
        policy = hub.learner.versions[held]
        save_held(directory / HELD_FILE, policy.version, ArrayWords(policy.words), layout=TINY)
    async with syncing(hub, directory, save_every_s=3600.0) as serving:
        await serving.reaches(hub.learner.versions[HEAD])
        assert serving.versions[0] == hub.learner.versions[held].version
        assert not serving.refusals
        return serving.registry.transferred("delta", "in") + serving.registry.transferred("keyframe", "in")


def quoted_bytes(path: tuple[Artifact, ...] | None) -> int:
    assert path is not None
    return sum(artifact.size_bytes for artifact in path)


async def test_samplers_that_slept_or_are_new_arrive_bit_exact_by_the_cheapest_path(
    published: Published, tmp_path: Path
) -> None:
    async with supplied_hub(published) as (hub, announcement):
        quotes: dict[int, int] = {}
        for slept in (1, 7, 33, 250, HEAD):
            held = HEAD - slept
            quotes[slept] = quoted_bytes(plan_catch_up(held, HEAD, announcement.artifacts))
            for way in ("spare", IN_PLACE):
                assert await arrive(hub, tmp_path / str(slept) / way, held=held) == quotes[slept]
        sizes = {artifact.key: artifact.size_bytes for artifact in announcement.artifacts}
        steps = {slept: sum(sizes[ArtifactKey(v, v - 1)] for v in newest(slept)) for slept in (1, 7, 33)}
        assert quotes[1] == steps[1]
        assert quotes[7] < steps[7]
        assert quotes[33] < 0.7 * steps[33]
        # Nobody pays for more than a keyframe, however long it slept.
        assert max(quotes.values()) <= min(size for key, size in sizes.items() if key.is_keyframe)


def newest(count: int) -> range:
    return range(HEAD - count + 1, HEAD + 1)
