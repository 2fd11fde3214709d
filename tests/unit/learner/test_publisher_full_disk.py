"""A publisher whose disk is full or slow: what waits, what gives way, and what is published then."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from bench.held_policy import HeldPolicy
from learner import disk_wait
from node.errors import Reason, RefusedError
from node.values.policy import ArtifactKey
from node.weights.store.artifact_store import ArtifactStore
from support.publishing import FRAMED, fetched, held, publishing, slow_disk, words_of


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_wait, "LONGEST_PAUSE_S", 0.02)


async def test_training_writes_on_as_soon_as_the_masters_were_read_whatever_the_disk_does(
    tmp_path: Path,
) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        with slow_disk(running.store) as disk:
            await running.step(1)
            await disk.reached()
            await asyncio.wait_for(running.step(2), timeout=10)
            disk.goes_on.set()
        await running.stored(ArtifactKey(2, 1))
        assert (fetched(running.store, base=held(0), version=1).words == words_of(1)).all()


@contextmanager
def no_room(store: ArtifactStore, failing: str) -> Iterator[threading.Semaphore]:
    """Let a store refuse for want of room; yields what counts its refusals."""
    refusals = threading.Semaphore(0)

    def fail(*_: object) -> None:
        refusals.release()
        raise RefusedError(Reason.DISK, "no room")

    with mock.patch.object(store, failing, fail):
        yield refusals


async def refused(refusals: threading.Semaphore, times: int = 1) -> None:
    for _ in range(times):
        assert await asyncio.to_thread(refusals.acquire, timeout=10)


async def test_versions_the_disk_had_no_room_for_give_way_to_the_newest_from_the_same_base(
    tmp_path: Path,
) -> None:
    async with publishing(tmp_path, start=held(0, FRAMED), layout=FRAMED) as running:
        await running.publish(1, 0)
        with no_room(running.store, "draft") as drafts:
            for version in (2, 3, 4):
                await running.step(version)
                await refused(drafts, 2)
        await running.stored(ArtifactKey(4, 1))
        made = fetched(running.store, base=held(0, FRAMED), version=4, layout=FRAMED)
        assert (made.words == words_of(4)).all()
        assert ArtifactKey(3, 1) not in running.keys


@pytest.mark.parametrize("failing", ["draft", "put_version"])
async def test_a_version_the_disk_has_no_room_for_is_published_when_there_is_some(
    tmp_path: Path, failing: str
) -> None:
    """Though no step comes after it: the next groups may depend on it."""
    async with publishing(tmp_path, start=held(0)) as running:
        with no_room(running.store, failing) as refusals:
            await running.step(1)
            await refused(refusals, 3)
            assert running.keys == []
        await running.stored(ArtifactKey(1, 0))
        assert (fetched(running.store, base=held(0), version=1).words == words_of(1)).all()
        await running.publish(2, 1)


async def test_a_start_on_a_full_disk_waits_and_publishes_its_version_then(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        await running.stop()
    with mock.patch.object(ArtifactStore, "draft", side_effect=RefusedError(Reason.DISK, "no room")) as draft:
        starting = asyncio.create_task(_published_keys(tmp_path, start=held(5)))
        while draft.call_count < 2:  # noqa: ASYNC110 - what is called has no event
            await asyncio.sleep(0.005)
    assert await asyncio.wait_for(starting, timeout=10) == [ArtifactKey(5, 0)]


async def _published_keys(directory: Path, *, start: HeldPolicy) -> list[ArtifactKey]:
    async with publishing(directory, start=start) as running:
        await running.stored(ArtifactKey(5, 0))
        return running.keys


async def test_a_publisher_that_waits_for_room_stops(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        with no_room(running.store, "draft") as refusals:
            await running.step(1)
            await refused(refusals, 2)
            await running.stop()
        assert running.keys == []
