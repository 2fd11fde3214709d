"""However long a peer was away and whatever it holds, it arrives by the cheapest way, bit-exact."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.held_policy import HeldPolicy
from node.errors import Reason
from node.values.policy import NO_BASE, Artifact
from node.weights.assembly.merge import join_merged, merge_frame
from node.weights.assembly.stored import StoredVersions
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import Manifest, sign
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, plan_catch_up
from node.weights.planning.skip_deltas import next_base
from node.weights.store.artifact_store import ArtifactStore
from support.present import present
from support.refusals import refused
from support.weights import Learner, put_version
from support.whole_version import WholeVersion

SMALL = Layout.of([TensorSpec("a", (16, 16)), TensorSpec("b", (70,))], frame_words=128)


def merged(
    learner: Learner, store: ArtifactStore, version: int, base: int, words0: Words
) -> tuple[Manifest, list[bytes]]:
    """Make the delta ``base`` -> ``version`` from what is stored."""
    head, payloads, frames = learner.versions[version], list[bytes](), []
    with StoredVersions(store, learner.layout, words0).opened(base) as old:
        for number, span in enumerate(learner.layout.frames):
            new = head.words[span.slice]
            frame, payload = merge_frame(number, new=new, old=old.words(number), layout=learner.layout)
            frames.append(frame)
            payloads.append(payload)
    manifest = join_merged(
        frames,
        head=head.version,
        base_version=base,
        layout=learner.layout,
        run_id=learner.run_id,
        learner_epoch=learner.epoch,
        published_at_s=1000.0 + version,
    )
    return manifest, payloads


def publish(learner: Learner, store: ArtifactStore, version: int, previous: int, *, keyframe: bool) -> None:
    """Publish as a learner does whose uplink is idle: step, keyframe, then every delta that is wanted."""
    learner.put(store, (version, previous))
    if keyframe:
        learner.put(store, (version, None))
    learner.words(version)
    while True:
        announcement = present(store.announcement())
        base = next_base(version, announcement.artifacts, longest_lag_versions=1000, public_every_versions=16)
        if base is None:
            return
        manifest, payloads = merged(learner, store, version, base, learner.words(0))
        put_version(store, sign(manifest, learner.key), payloads)


def test_a_merged_delta_is_the_one_that_coding_against_the_old_words_would_make(tmp_path: Path) -> None:
    learner = Learner(layout=SMALL)
    store = learner.store(tmp_path)
    learner.put(store, (1, 0), (2, 1), (3, None), (4, 3), (5, 4))
    learner.words(5)
    for base in (0, 1, 2, 3):
        coded = learner.encode(5, base)
        assert merged(learner, store, 5, base, learner.words(0)) == (coded.manifest, list(coded.payloads))


def test_a_delta_made_from_a_base_model_that_rots_on_disk_starts_from_no_version(tmp_path: Path) -> None:
    learner = Learner(layout=SMALL)
    learner.words(1)
    rotten = learner.words(0).copy()
    rotten[5] ^= 1
    manifest, _ = merged(learner, learner.store(tmp_path), 1, 0, rotten)
    assert manifest.base_root == HeldPolicy.of(0, rotten, layout=SMALL).version.root
    with refused(Reason.WRONG_BASE):
        WholeVersion(manifest, layout=SMALL, base=learner.versions[0])


def arrive(learner: Learner, store: ArtifactStore, held: int) -> tuple[HeldPolicy, tuple[Artifact, ...]]:
    """Go from ``held`` (NO_BASE: a peer without the base model) to the head; give what was taken."""
    announcement = present(store.announcement())
    path = present(plan_catch_up(held, announcement.head.number, announcement.artifacts))
    policy = None if held == NO_BASE else learner.versions[held]
    for artifact in path:
        manifest = store.manifest(artifact.key)
        base = learner.versions[0] if artifact.key.base_version == PUBLIC_VERSION else policy
        stage = WholeVersion(manifest, layout=learner.layout, base=base)
        stage.take_held()
        for frame in stage.missing():
            stage.put(frame, store.read_payload(artifact.key, frame))
        policy = stage.finish()
    assert policy is not None
    return policy, path


@given(
    gaps=st.lists(st.integers(1, 6), min_size=1, max_size=25),
    keyframe_every=st.integers(3, 12),
    held_index=st.integers(0, 24),
)
@settings(max_examples=15)
def test_whatever_was_published_every_holder_arrives_bit_exact(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[int], keyframe_every: int, held_index: int
) -> None:
    learner = Learner(layout=SMALL)
    store = learner.store(tmp_path_factory.mktemp("store"), retained_keyframes=1)
    numbers = [0, *itertools.accumulate(gaps)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        for count, (previous, version) in enumerate(itertools.pairwise(numbers), start=1):
            publish(learner, store, version, previous, keyframe=count % keyframe_every == 0)
    policy, _ = arrive(learner, store, numbers[held_index % len(numbers)])
    assert policy.version == learner.versions[numbers[-1]].version
    np.testing.assert_array_equal(policy.words, learner.words(numbers[-1]))
