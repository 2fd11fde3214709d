import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from learner.metrics import LearnerMetrics
from learner.records import writer_thread
from learner.records.writer_thread import QUEUED_STEPS, WriterThread
from learner.step_log import StepLine
from node.values.groups.rollout import RolloutGroup
from support.step_lines import make_step_line
from support.waiting import until


class Recorder:
    """Fails at some versions, and waits at each until it is let go; version 0 is not its turn."""

    name = "recorder"

    def __init__(self, *, fails_at: Sequence[int] = (), is_held: bool = False) -> None:
        self.versions: list[int] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.is_closed = False
        self._fails_at = fails_at
        if not is_held:
            self.go.set()

    def write_of(self, line: StepLine | None, batch: Sequence[RolloutGroup]) -> Callable[[], None] | None:
        return partial(self._write, line.version) if line and line.version else None

    def _write(self, version: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.begun.set()
        assert self.go.wait(30)
        if version in self._fails_at:
            raise RuntimeError("no server")
        self.versions.append(version)

    def close(self) -> None:
        self.is_closed = True


class Running:
    def __init__(self, writer: Recorder) -> None:
        self.registry = CollectorRegistry()
        self.service = WriterThread(writer, metrics=LearnerMetrics(self.registry))
        self.stopping = asyncio.Event()
        self.task = asyncio.create_task(self.service.run(ready=lambda: None, stopping=self.stopping))

    def count(self, outcome: str) -> float:
        labels = {"writer": "recorder", "outcome": outcome}
        return self.registry.get_sample_value("heterorl_learner_step_writes_total", labels) or 0.0

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.task, timeout=30)


async def test_steps_offered_before_the_stop_are_written_and_the_writer_is_closed() -> None:
    recorder = Recorder()
    running = Running(recorder)
    for version in (0, 1, 2):
        running.service.offer(make_step_line(version), ())
    await running.stop()
    assert recorder.versions == [1, 2]
    assert recorder.is_closed
    assert running.count("written") == 2


async def test_a_writer_that_fails_is_counted_logged_once_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    recorder = Recorder(fails_at=(1, 2))
    running = Running(recorder)
    for version in (1, 2, 3):
        running.service.offer(make_step_line(version), ())
    await running.stop()
    assert recorder.versions == [3]
    assert (running.count("failed"), running.count("written")) == (2, 1)
    said = [record for record in caplog.records if record.message.startswith("step writer")]
    assert [record.message for record in said] == ["step writer failed", "step writer works again"]
    assert said[0].__dict__["error"] == "RuntimeError: no server"


async def test_training_does_not_wait_for_a_writer_that_is_slow() -> None:
    slow = Recorder(is_held=True)
    running = Running(slow)
    running.service.offer(make_step_line(1), ())
    await until(slow.begun.is_set)
    for version in range(2, QUEUED_STEPS + 4):
        running.service.offer(make_step_line(version), ())
    assert running.count("dropped") == 2
    slow.go.set()
    await running.stop()
    assert slow.versions == list(range(1, QUEUED_STEPS + 2))


async def test_a_writer_that_hangs_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_thread, "CLOSE_S", 0.1)
    hung = Recorder(is_held=True)
    running = Running(hung)
    running.service.offer(make_step_line(1), ())
    await running.stop()
    assert "step writer is late" in caplog.messages
    hung.go.set()
