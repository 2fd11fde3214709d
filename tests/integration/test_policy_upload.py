"""The learner's hub is kept supplied, whatever happens to it; each frame travels once."""

import asyncio
from pathlib import Path

import pytest

from bench.held_policy import HeldPolicy
from node.errors import Reason, RefusedError
from node.values.policy import ArtifactKey
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.artifact_uploader import ARTIFACTS_PER_ROUND
from support.identity import MadeRun
from support.policy_hub import PolicyHub, policy_hub, policy_hub_fixture
from support.uploading import uploading
from support.waiting import until
from support.weights import LAYOUT, Learner, flip_bit, frames_file, keys, offsets

hub = policy_hub_fixture()


@pytest.fixture
def store(hub: PolicyHub, tmp_path: Path) -> ArtifactStore:
    """Return the learner's own store."""
    return hub.learner.store(tmp_path / "local")


async def until_supplied(hub: PolicyHub, store: ArtifactStore) -> None:
    await until(lambda: hub.store.announcement() == store.announcement())


@pytest.mark.parametrize("channels", [1, 3])
async def test_a_hub_gets_what_is_there_and_what_is_published(
    hub: PolicyHub, store: ArtifactStore, made: MadeRun, channels: int
) -> None:
    hub.learner.put(store, (1, 0), (2, 1))
    async with uploading(made, store, hub.serving.address, channels=channels) as registry:
        await until_supplied(hub, store)
        await asyncio.to_thread(hub.learner.put, store, (3, 2), (3, None), (4, 3))
        await until_supplied(hub, store)
    announcement = store.announcement()
    assert announcement is not None
    deltas = sum(a.size_bytes for a in announcement.artifacts if not a.key.is_keyframe)
    assert registry.transferred("delta", "out") == hub.registry.transferred("delta", "in") == deltas


async def test_a_frame_that_rotted_on_the_hub_is_sent_again_alone(
    hub: PolicyHub, store: ArtifactStore, made: MadeRun, tmp_path: Path
) -> None:
    hub.learner.put(store, (1, 0), (2, 1))
    async with uploading(made, store, hub.serving.address):
        await until_supplied(hub, store)
        hub.servicer.uploaded.clear()
        payloads = hub.learner.encode(1, 0).payloads
        flip_bit(frames_file(tmp_path / "hub", ArtifactKey(1, 0)), offsets(payloads)[2])
        with pytest.raises(RefusedError):
            await asyncio.to_thread(hub.store.read_payload, ArtifactKey(1, 0), 2)
        await until_supplied(hub, store)
        assert hub.servicer.uploaded == [2]


async def test_a_hub_killed_within_an_upload_gets_only_the_missing_frames(
    hub: PolicyHub, store: ArtifactStore, made: MadeRun
) -> None:
    signed, payloads = hub.learner.signed(1, None)
    hub.store.offer_signed(signed)
    for frame in (0, 2, 3):
        hub.store.write_frame(ArtifactKey(1), frame, payloads[frame])
    hub.learner.put(store, (1, None))
    async with uploading(made, store, hub.serving.address):
        await until_supplied(hub, store)
    assert hub.servicer.uploaded == [1, 4]


async def test_an_upload_goes_on_when_the_hub_comes_back_though_it_lost_its_artifacts(
    made: MadeRun, tmp_path: Path
) -> None:
    async with policy_hub(made, tmp_path / "hub") as first:
        learner, address = first.learner, first.serving.address
        store = learner.store(tmp_path / "local")
        learner.put(store, (1, 0), (2, 1), (3, 2))
    async with uploading(made, store, address):
        async with policy_hub(made, tmp_path / "hub", listen=address, learner=learner) as second:
            await until_supplied(second, store)
        await asyncio.to_thread(lost_artifacts, tmp_path / "hub")
        async with policy_hub(made, tmp_path / "hub", listen=address, learner=learner) as third:
            assert keys(third.store) == []
            await until_supplied(third, store)


async def test_a_hub_that_lost_its_disk_is_not_offered_what_it_can_only_refuse(
    made: MadeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with policy_hub(made, tmp_path / "hub") as first:
        learner, address = first.learner, first.serving.address
        store = learner.store(tmp_path / "local")
        learner.put(store, (1, None))
        async with uploading(made, store, address):
            await until_supplied(first, store)
            learner.put(store, (2, 0))
            await until_supplied(first, store)
    await asyncio.to_thread(lost_artifacts, tmp_path / "hub")
    async with (
        policy_hub(made, tmp_path / "hub", listen=address, learner=learner) as second,
        uploading(made, store, address),
    ):
        await until(lambda: keys(second.store) == [(2, 0)])
        learner.put(store, (3, 2))
        await until(lambda: keys(second.store) == [(2, 0), (3, 2)])
    assert "the hub does not take an older version" not in caplog.text


def lost_artifacts(directory: Path) -> None:
    """Lose every artifact, but not the mark that says what was announced."""
    for artifact in (directory / "complete").iterdir():
        (artifact / "manifest").unlink()


async def test_a_hub_that_lost_everything_is_given_all_that_follows_the_newest_keyframe(
    hub: PolicyHub, store: ArtifactStore, made: MadeRun
) -> None:
    for version in range(1, 41):
        hub.learner.put(store, (version, version - 1))
        if version % 4 == 0:
            hub.learner.put(store, (version, version - 4))
    hub.learner.put(store, (10, None))
    wanted = {key for key in keys(store) if (key[1] if key[1] >= 0 else key[0]) >= 10}
    assert len(wanted) > 2 * ARTIFACTS_PER_ROUND
    async with uploading(made, store, hub.serving.address):
        await until(lambda: wanted <= set(keys(hub.store)))


async def test_a_damaged_local_artifact_is_left_out_and_the_rest_is_sent(
    hub: PolicyHub, store: ArtifactStore, made: MadeRun, tmp_path: Path
) -> None:
    hub.learner.put(store, (1, None), (1, 0), (2, 1))
    flip_bit(frames_file(tmp_path / "local", ArtifactKey(1, 0)), 3)
    async with uploading(made, store, hub.serving.address):
        await until(lambda: keys(hub.store) == [(1, -1), (2, 1)])
    assert keys(store) == [(1, -1), (2, 1)]


async def ended_by(made: MadeRun, store: ArtifactStore, address: str) -> Reason:
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(10), uploading(made, store, address):
            await asyncio.Event().wait()
    (refusal,) = ended.value.exceptions
    assert isinstance(refusal, RefusedError)
    return refusal.reason


async def test_a_learner_that_was_replaced_ends(hub: PolicyHub, store: ArtifactStore, made: MadeRun) -> None:
    hub.learner.put(store, (1, 0))
    hub.learner.epoch = 2
    hub.learner.put(hub.store, (3, None))
    assert await ended_by(made, store, hub.serving.address) is Reason.FENCED


async def test_a_learner_restored_from_an_old_checkpoint_ends(
    hub: PolicyHub, made: MadeRun, tmp_path: Path
) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1))
    fork = Learner(run_id=made.run_id, key=made.signing_key, epoch=2)
    fork.words(1)
    fork.versions[2] = HeldPolicy.of(2, hub.learner.words(3), layout=LAYOUT)
    store = fork.store(tmp_path / "local")
    fork.put(store, (1, 0), (2, 1))
    assert await ended_by(made, store, hub.serving.address) is Reason.ROLLBACK
