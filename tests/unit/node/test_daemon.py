import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from node.errors import ConfigError, Reason, RefusedError, StartupError
from node.exit_code import ExitCode, exit_code_of_failure
from node.process import daemon
from node.process.daemon import Phase, StartStage, run_daemon
from node.process.service import Service


class Story(list[str]):
    """Events in order; can be waited on."""

    def __init__(self) -> None:
        super().__init__()
        self._grew = asyncio.Event()

    def append(self, line: str) -> None:
        super().append(line)
        self._grew.set()

    async def wait_for(self, line: str) -> None:
        while line not in self:
            self._grew.clear()
            await self._grew.wait()


@dataclass
class Scripted:
    """A service that writes what happens to it into the story."""

    name: str
    story: Story
    is_ready: bool = True
    fails: Exception | None = None
    finishes: asyncio.Event | None = None
    drains_after: asyncio.Event | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        self.story.append(f"{self.name} starts")
        try:
            if self.is_ready:
                ready()
            if self.fails is not None:
                await self.gate.wait()
                raise self.fails
            if self.finishes is not None:
                await self.finishes.wait()
                return
            await stopping.wait()
            self.story.append(f"{self.name} drains")
            if self.drains_after is not None:
                await self.drains_after.wait()
        except asyncio.CancelledError:
            self.story.append(f"{self.name} is cancelled")
            raise
        self.story.append(f"{self.name} ends")


def stage(name: str, *services: Service) -> StartStage:
    async def build() -> Sequence[Service]:
        return services

    return StartStage(name, build)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def stop_when_serving(story: Story, number: signal.Signals = signal.SIGTERM) -> Callable[[Phase], None]:
    def announce(phase: Phase) -> None:
        story.append(phase)
        if phase is Phase.SERVING:
            send(number)

    return announce


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_stages_start_in_order_and_drain_in_reverse(number: signal.Signals) -> None:
    story = Story()
    stages = [
        stage("a", Scripted("a1", story), Scripted("a2", story)),
        stage("b", Scripted("b1", story)),
    ]
    exit_code = await run_daemon(stages, drain_timeout_s=60, announce=stop_when_serving(story, number))
    assert exit_code is ExitCode.DRAINED
    assert story[:5] == ["a1 starts", "a2 starts", "b1 starts", "serving", "draining"]
    assert story[5:7] == ["b1 drains", "b1 ends"]
    assert sorted(story[7:]) == ["a1 drains", "a1 ends", "a2 drains", "a2 ends"]


async def test_a_hangup_that_comes_twice_does_not_cut_the_drain_short() -> None:
    """The kernel sends one to the foreground when a terminal closes, and the shell one more."""
    story = Story()
    may_end = asyncio.Event()
    slow = Scripted("slow", story, drains_after=may_end)
    daemon = asyncio.create_task(run_daemon([stage("s", slow)], drain_timeout_s=60, announce=story.append))
    await story.wait_for("serving")
    send(signal.SIGHUP)
    await story.wait_for("slow drains")
    send(signal.SIGHUP)
    await asyncio.sleep(0.05)  # nothing happens, for which there is no event
    assert "slow ends" not in story
    may_end.set()
    assert await daemon is ExitCode.DRAINED


async def test_a_hangup_that_was_ignored_at_the_start_stays_ignored() -> None:
    """As under nohup."""
    story = Story()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stages = [stage("s", Scripted("s1", story))]
        daemon = asyncio.create_task(run_daemon(stages, drain_timeout_s=60, announce=story.append))
        await story.wait_for("serving")
        send(signal.SIGHUP)
        await asyncio.sleep(0.05)  # nothing happens, for which there is no event
        assert "draining" not in story
        send(signal.SIGTERM)
        assert await daemon is ExitCode.DRAINED
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_stage_is_not_even_built_before_the_one_before_it_is_ready() -> None:
    story = Story()
    late = Scripted("late", story, is_ready=False)

    async def build() -> Sequence[Service]:
        story.append("built")
        return []

    stages = [stage("late", late), StartStage("next", build)]
    daemon = asyncio.create_task(run_daemon(stages, drain_timeout_s=60, announce=story.append))
    await story.wait_for("late starts")
    send(signal.SIGTERM)
    assert await daemon is ExitCode.DRAINED
    assert story == ["late starts", "draining", "late drains", "late ends"]


async def test_a_service_that_finishes_its_work_stops_the_daemon_cleanly() -> None:
    story = Story()
    done = asyncio.Event()
    done.set()
    stages = [
        stage("hub", Scripted("hub", story)),
        stage("learner", Scripted("learner", story, finishes=done)),
    ]
    assert await run_daemon(stages, drain_timeout_s=60, announce=story.append) is ExitCode.DRAINED
    assert story[-2:] == ["hub drains", "hub ends"]


async def test_a_service_that_fails_while_serving_drains_the_others_and_exits_with_failed() -> None:
    story = Story()
    failing = Scripted("failing", story, fails=RuntimeError("broken"))

    def announce(phase: Phase) -> None:
        if phase is Phase.SERVING:
            failing.gate.set()

    stages = [stage("hub", Scripted("hub", story)), stage("failing", failing)]
    assert await run_daemon(stages, drain_timeout_s=60, announce=announce) is ExitCode.FAILED
    assert story[-2:] == ["hub drains", "hub ends"]


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (StartupError("port taken", fix="Take another."), ExitCode.COULD_NOT_START),
        (RuntimeError("anything"), ExitCode.COULD_NOT_START),
        (ConfigError(key="k", value=1, source="s", rule="r", fix="f"), ExitCode.CONFIGURATION),
        (RefusedError(Reason.REVOKED, "s was revoked"), ExitCode.SHUT_OUT),
        (RefusedError(Reason.WRONG_ROLE, "s is no learner"), ExitCode.COULD_NOT_START),
        (
            ExceptionGroup("tasks", [ConfigError(key="k", value=1, source="s", rule="r", fix="f")]),
            ExitCode.CONFIGURATION,
        ),
    ],
)
async def test_what_fails_before_all_are_ready_could_not_start(error: Exception, exit_code: ExitCode) -> None:
    story = Story()
    failing = Scripted("failing", story, is_ready=False, fails=error)
    failing.gate.set()
    stages = [stage("hub", Scripted("hub", story)), stage("failing", failing)]
    assert await run_daemon(stages, drain_timeout_s=60, announce=story.append) is exit_code
    assert "serving" not in story
    assert story[-2:] == ["hub drains", "hub ends"]


@pytest.mark.parametrize(
    ("reason", "exit_code"),
    [
        (Reason.REVOKED, ExitCode.SHUT_OUT),
        (Reason.FENCED, ExitCode.SHUT_OUT),
        (Reason.BASE_MISMATCH, ExitCode.COULD_NOT_START),
        (Reason.LAYOUT_MISMATCH, ExitCode.COULD_NOT_START),
        (Reason.TOKENIZER_MISMATCH, ExitCode.COULD_NOT_START),
        (Reason.TASK_MISMATCH, ExitCode.COULD_NOT_START),
        (Reason.FOREIGN_RUN, ExitCode.FAILED),
    ],
)
def test_a_process_that_is_shut_out_says_so_to_its_supervisor(reason: Reason, exit_code: ExitCode) -> None:
    refused = RefusedError(reason, "no", is_remote=True)
    assert exit_code_of_failure(refused, was_serving=True) is exit_code


async def test_a_stage_that_cannot_be_built_could_not_start(caplog: pytest.LogCaptureFixture) -> None:
    story = Story()

    async def build() -> Sequence[Service]:
        raise StartupError("no certificate", fix="Enrol.")

    broken = StartStage("learner", build)
    stages = [stage("hub", Scripted("hub", story)), broken, stage("never", Scripted("never", story))]
    assert await run_daemon(stages, drain_timeout_s=60, announce=story.append) is ExitCode.COULD_NOT_START
    assert story == ["hub starts", "draining", "hub drains", "hub ends"]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(record)["error"] == "no certificate. Enrol."
    assert record.exc_info is None


async def test_who_is_late_to_drain_is_named_and_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    story = Story()
    stages = [
        stage("hub", Scripted("hub", story)),
        stage("learner", Scripted("stuck", story, drains_after=asyncio.Event()), Scripted("quick", story)),
    ]
    announce = stop_when_serving(story)
    assert await run_daemon(stages, drain_timeout_s=0.05, announce=announce) is ExitCode.FAILED
    (record,) = [record for record in caplog.records if record.message == "late to drain"]
    assert vars(record)["services"] == ["hub", "stuck"]
    assert {"stuck is cancelled", "quick ends"} <= set(story)


async def test_the_process_ends_without_a_service_that_does_not_heed_its_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, ended = asyncio.Event(), list[tuple[str, int]]()

    class Deaf(Scripted):
        async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
            try:
                await super().run(ready=ready, stopping=stopping)
            finally:
                await may_end.wait()

    def end(exit_code: int) -> None:
        ended.append(("exit", exit_code))
        may_end.set()

    monkeypatch.setattr(daemon, "CANCELLED_S", 0.05)
    monkeypatch.setattr(daemon, "abandon", lambda name: ended.append((name, 0)))
    monkeypatch.setattr(daemon, "exit_without_them", end)
    story = Story()
    stages = [stage("s", Deaf("deaf", story, drains_after=asyncio.Event()))]
    announce = stop_when_serving(story)
    assert await run_daemon(stages, drain_timeout_s=0.05, announce=announce) is ExitCode.FAILED
    assert ended == [("deaf", 0), ("exit", ExitCode.FAILED)]


async def test_a_second_signal_ends_the_drain_at_once() -> None:
    story = Story()
    stuck = Scripted("stuck", story, drains_after=asyncio.Event())
    announce = stop_when_serving(story)
    daemon = asyncio.create_task(run_daemon([stage("s", stuck)], drain_timeout_s=3600, announce=announce))
    await story.wait_for("stuck drains")
    send(signal.SIGTERM)
    assert await daemon is ExitCode.FAILED
    assert story[-1] == "stuck is cancelled"


async def test_the_first_signal_during_the_drain_after_a_failure_lets_the_drain_go_on() -> None:
    story = Story()
    goes_on = asyncio.Event()
    failing = Scripted("failing", story, is_ready=False, fails=RuntimeError("broken"))
    failing.gate.set()
    stages = [stage("hub", Scripted("hub", story, drains_after=goes_on)), stage("failing", failing)]
    daemon = asyncio.create_task(run_daemon(stages, drain_timeout_s=3600, announce=story.append))
    await story.wait_for("hub drains")
    send(signal.SIGTERM)
    for _ in range(20):  # turns of the event loop: enough for the signal to do what it does
        await asyncio.sleep(0)
    goes_on.set()
    assert await daemon is ExitCode.COULD_NOT_START
    assert story[-1] == "hub ends"


async def test_a_signal_during_a_slow_build_stops_without_waiting_for_it() -> None:
    story = Story()

    async def build() -> Sequence[Service]:
        story.append("building")
        await asyncio.Event().wait()
        return []

    daemon = asyncio.create_task(
        run_daemon([StartStage("slow", build)], drain_timeout_s=60, announce=story.append)
    )
    await story.wait_for("building")
    send(signal.SIGTERM)
    assert await daemon is ExitCode.DRAINED
    assert story == ["building", "draining"]


async def test_the_first_failure_decides_the_exit_code() -> None:
    story = Story()
    first = Scripted("first", story, is_ready=False, fails=StartupError("no port", fix="Free it."))
    first.gate.set()

    @dataclass
    class FailsInDrain:
        name: str = "second"

        async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
            ready()
            await stopping.wait()
            raise ConfigError(key="k", value=1, source="s", rule="r", fix="f")

    stages = [stage("a", FailsInDrain()), stage("b", first)]
    assert await run_daemon(stages, drain_timeout_s=60, announce=story.append) is ExitCode.COULD_NOT_START
