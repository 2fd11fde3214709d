"""A learner whose disk is full: it waits, says so, and takes each step once."""

import asyncio
import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.journal.step_journal import FILE
from learner.model.model import Policy
from node.system import durable
from support.full_disk import full_disk
from support.scripted_hub import scripted_hub
from support.training_loop import RunningLearner, Start, learner
from support.waiting import until


def waiting(running: RunningLearner) -> float:
    return running.registry.get_sample_value("heterorl_node_waiting_tasks", {"for": "disk"}) or 0.0


def refusals(running: RunningLearner) -> float:
    labels = {"service": "Learner", "reason": "disk"}
    return running.registry.get_sample_value("heterorl_node_refusals_total", labels) or 0.0


def lines_in(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def words_of(policy: Policy) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return torch.cat([tensor.detach().flatten() for tensor in policy.tensors.values()]).numpy().copy()


async def test_a_full_disk_is_waited_for_and_the_step_is_taken_once(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def train(state: Path, *, is_full: bool) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        async with scripted_hub() as hub, learner(hub, model_dir, state) as running:
            await running.give("0.1", "1.1")
            await hub.wait_until(lambda: len(hub.records) == 1)
            await until(lambda: lines_in(state / "steps.jsonl") == 1)  # or it is this line that is refused
            with full_disk(1_000) if is_full else nullcontext():
                await running.give("2.1", "3.1", version=1)
                if is_full:
                    await until(lambda: refusals(running) >= 3)
                    assert waiting(running) == 1
                    assert not any(task.done() for task in running.tasks)
                    # Nobody is told of what is not durable, and the publisher does not read it.
                    assert (running.loop.version, len(hub.records)) == (1, 1)
                    assert running.access.take() is None
            await hub.wait_until(lambda: len(hub.records) == 2)
            await running.give("4.1", "5.1", version=2)
            await hub.wait_until(lambda: len(hub.records) == 3)
            await until(lambda: lines_in(state / "steps.jsonl") == 3)
            assert waiting(running) == 0
            assert hub.trained_group_ids == [f"{n}.1" for n in range(6)]
            return words_of(running.policy)

    undisturbed = await train(tmp_path / "undisturbed", is_full=False)
    np.testing.assert_array_equal(await train(tmp_path / "full", is_full=True), undisturbed)
    warnings = [record for record in caplog.records if record.message == "disk takes no writes"]
    assert vars(warnings[0])["what"] == "the journal's entry of step 2"
    assert FILE in vars(warnings[0])["detail"]
    lines = map(json.loads, (tmp_path / "full" / "steps.jsonl").read_text().splitlines())
    assert [line["version"] for line in lines] == [1, 2, 3]


async def test_a_disk_too_full_for_the_line_of_a_step_keeps_the_next_step_waiting(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step itself is durable and told; every version has its line all the same."""
    is_full = True
    append = durable.append

    def append_if_there_is_room(path: Path, content: bytes) -> None:
        if is_full and path.name == "steps.jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, content)

    monkeypatch.setattr(durable, "append", append_if_there_is_room)
    async with start() as running:
        hub = running.hub
        await running.give("0.1", "1.1", "2.1", "3.1")
        await hub.wait_until(lambda: len(hub.records) == 1)
        await until(lambda: refusals(running) >= 2)
        assert (waiting(running), len(hub.records)) == (1, 1)
        is_full = False
        await hub.wait_until(lambda: len(hub.records) == 2)
        await until(lambda: lines_in(running.directory / "steps.jsonl") == 2)


async def test_a_learner_that_waits_for_its_disk_stops_and_the_step_is_taken_after_the_next_start(
    start: Start,
) -> None:
    async with start() as running:
        with full_disk(1_000):
            await running.give("0.1", "1.1")
            await until(lambda: refusals(running) >= 1)
            running.stopping.set()
            async with asyncio.timeout(10):
                await asyncio.gather(*running.tasks)
        assert (running.loop.version, running.hub.records) == (0, [])
    async with start() as running:
        await running.hub.wait_until(lambda: len(running.hub.records) == 1)
        assert running.hub.trained_group_ids == ["0.1", "1.1"]
        assert running.loop.version == 1
    assert len(running.lines) == 1


async def test_an_error_that_room_does_not_change_ends_the_learner(start: Start) -> None:
    async with start() as running:
        (running.directory / FILE).unlink()
        await running.give("0.1", "1.1")
        with pytest.raises(FileNotFoundError):
            await asyncio.wait_for(running.tasks[1], timeout=10)
