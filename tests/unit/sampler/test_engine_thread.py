import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from node.errors import Reason, RefusedError
from node.values.groups.sampling_parameters import SamplingParameters
from node.values.policy import PolicyVersion
from sampler.config import SamplerConfig
from sampler.engines import engine_thread
from sampler.engines.engine import GenerationRequest
from sampler.engines.engine_thread import RESTARTS, Change, EngineHungError, EngineThread
from sampler.engines.own_process.process_engine import ProcessEngine
from sampler.engines.restartable_engine import EngineFaultError, RestartableEngine
from sampler.engines.words.model_words import ArrayWords, copy_words, version_of
from sampler.metrics import SamplerMetrics
from sampler.sampler_role import load_configured_engine
from sampler.served_policy import Event, ServedPolicy, State
from support.model_words import words_of
from support.present import present
from support.refusals import refused
from support.tiny_model import make_tiny_model
from support.waiting import until

LONG = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=200)
SHORT = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), hidden=32, layers=1)


class Generating:
    def __init__(self, model_dir: Path, faults: Path, *, step_limit_s: float, process: str) -> None:
        config = SamplerConfig(
            model_dir=model_dir,
            engine="support.failing_engine:load",
            engine_options={"faults": str(faults)},
            engine_process="own" if process == "own" else "inside",
            threads=1,
            seed=3,
        )
        self.faults = faults
        self.engine = RestartableEngine(lambda: load_configured_engine(config))
        self.registry = CollectorRegistry()
        self.lost: list[str] = []
        self.policy = ServedPolicy(is_generating=lambda _: False)
        self.policy.listen(self._note)
        self.engine_thread = EngineThread(
            self.engine, self.policy, step_limit_s=step_limit_s, metrics=SamplerMetrics(self.registry)
        )
        self.finished: asyncio.Queue[GenerationRequest] = asyncio.Queue()
        self.refused: asyncio.Queue[tuple[str, RefusedError]] = asyncio.Queue()

    def version(self, number: int) -> PolicyVersion:
        return version_of(number, self.engine.weights.live, layout=self.engine.layout)

    def _note(self, _: PolicyVersion | None) -> None:
        if self.policy.state is State.LOST:
            self.lost.append("words")

    async def hand_over(self, change: Change) -> None:
        """Change the words to a version, as from the disk."""
        self.policy.note(Event.RESTORE)
        version = present(await self.engine_thread.hand_over(change))
        self.policy.hold(version, now=0.0)

    async def serve(self, number: int) -> None:
        """Hand over a change that changes nothing but the number."""
        await self.hand_over(lambda: self.version(number))
        assert self.policy.held == self.version(number)

    def add(
        self, name: str, sampling: SamplingParameters, *, completions: int = 4, prompt: str = "1+1="
    ) -> None:
        ids = self.engine.tokenizer.encode(prompt)
        self.engine_thread.add(GenerationRequest(name, ids, completions, sampling))

    def refuse(self, request_id: str, error: RefusedError) -> None:
        self.refused.put_nowait((request_id, error))

    def value(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"heterorl_sampler_{name}")


@asynccontextmanager
async def generating(
    model_dir: Path, *, step_limit_s: float = 60.0, process: str = "inside"
) -> AsyncIterator[Generating]:
    made = Generating(model_dir, model_dir / "faults", step_limit_s=step_limit_s, process=process)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            made.engine_thread.run(
                finished=made.finished.put_nowait,
                refused=made.refuse,
                failed=lambda: made.lost.append("requests"),
            )
        )
        yield made
        running.cancel()


async def test_nothing_is_generated_while_no_version_is_served(model_dir: Path) -> None:
    async with generating(model_dir) as made:
        made.add("a", SHORT)
        await made.engine_thread.hand_over(lambda: None)
        await made.engine_thread.hand_over(lambda: None)
        assert made.value("decode_steps_total") == 0
        await made.serve(0)
        assert (await made.finished.get()).request_id == "a"


async def test_a_step_does_not_wait_for_the_event_loop(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with generating(model_dir) as made:
        engine = made.engine.current
        step, steps = engine.step, 0
        may_step, stepped_on = threading.Event(), threading.Event()
        may_step.set()

        def counted() -> list[GenerationRequest]:
            nonlocal steps
            assert may_step.wait(30)
            done = step()
            steps += 1
            if any(request.request_id == "first" for request in done):
                steps = 0
                may_step.clear()
            if steps == 20:
                stepped_on.set()
            return done

        monkeypatch.setattr(engine, "step", counted)
        await made.serve(0)
        made.add("after the probe", SHORT)  # for which the thread comes back to the loop
        assert (await made.finished.get()).request_id == "after the probe"
        may_step.clear()
        made.add("long", LONG, completions=32)
        made.add("first", SHORT)
        may_step.set()
        assert (await made.finished.get()).request_id == "first"
        assert not stepped_on.is_set()
        may_step.set()
        assert stepped_on.wait(30)
        assert (await made.finished.get()).request_id == "long"


async def test_requests_that_wait_in_the_engine_are_counted(model_dir: Path) -> None:
    async with generating(model_dir) as made:
        made.engine.add(GenerationRequest("a", made.engine.tokenizer.encode("1"), 2, SHORT))
        assert made.value("engine_waiting_requests") == 1
        await made.serve(0)
        made.add("b", SHORT)
        assert {(await made.finished.get()).request_id for _ in range(2)} == {"a", "b"}
        assert made.value("engine_waiting_requests") == 0


async def test_the_engine_is_closed_once_its_thread_has_ended(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    async with generating(model_dir) as made:
        close = made.engine.close

        def noted() -> None:
            threads.append(threading.current_thread().name)
            close()

        monkeypatch.setattr(made.engine, "close", noted)
        await made.serve(0)
        made.add("a", LONG)
        made.add("first", SHORT)
        await made.finished.get()
        assert threads == []
    assert threads == ["engine_0"]
    assert made.engine.running == 0


def tear() -> PolicyVersion:
    raise RefusedError(Reason.DAMAGED, "half of it was written")


async def test_after_a_change_that_failed_nothing_is_sampled_until_another_one_was_made(
    model_dir: Path,
) -> None:
    async with generating(model_dir) as made:
        await made.serve(1)
        made.add("long", LONG, completions=32)
        made.add("first", SHORT)
        await made.finished.get()
        with refused(Reason.DAMAGED, "half of it"):
            await made.engine_thread.hand_over(tear)
        assert made.policy.state is State.LOST
        steps = made.value("decode_steps_total")
        # Its rendezvous is between two steps, so that one would have been made by now.
        await made.engine_thread.hand_over(lambda: None)
        await made.engine_thread.hand_over(lambda: None)
        assert made.value("decode_steps_total") == steps
        await made.serve(2)
        group = await made.finished.get()
        versions = {int(v) for completion in group.completions for v in completion.policy_version}
        assert versions == {1, 2}


async def test_a_request_that_is_cancelled_or_that_the_engine_will_not_take_goes_alone(
    model_dir: Path,
) -> None:
    async with generating(model_dir) as made:
        await made.serve(0)
        made.add("too long", SHORT, prompt="1" * 300)
        made.add("long", LONG, completions=32)
        made.add("first", SHORT)
        assert (await made.finished.get()).request_id == "first"
        name, error = await made.refused.get()
        assert (name, error.reason) == ("too long", Reason.OVER_LIMIT)
        made.engine_thread.cancel(["long"])
        made.add("last", SHORT)
        assert (await made.finished.get()).request_id == "last"
        assert made.engine.running == 0
        assert made.finished.empty()


async def test_an_engine_that_fails_again_and_again_ends_its_thread(model_dir: Path) -> None:
    made: list[Generating] = []

    async def fail_for_ever() -> None:
        async with generating(model_dir) as failing:
            made.append(failing)
            failing.faults.write_text("broken")
            version = failing.version(1)
            for number in range(2 * RESTARTS):
                await failing.hand_over(lambda: version)
                faults = 2 * (number + 1)
                await until(lambda n=faults: len(failing.lost) == n)  # type: ignore[misc]

    try:
        with pytest.raises(ExceptionGroup) as ended:
            await fail_for_ever()
    finally:
        made[0].faults.unlink()
    [error] = ended.value.exceptions
    assert isinstance(error, EngineFaultError)
    assert "illegal memory access" in str(error)
    assert made[0].lost == ["words", "requests"] * (RESTARTS + 1)


async def test_a_change_in_which_the_engine_fails_is_refused(model_dir: Path) -> None:
    def change() -> PolicyVersion:
        raise MemoryError("no room for the words")

    async with generating(model_dir) as made:
        with refused(Reason.DAMAGED, "no room for the words"):
            await made.engine_thread.hand_over(change)
        await made.serve(1)
        assert made.value("engine_restarts_total") == 1


@pytest.mark.usefixtures("warm_engines")
async def test_a_process_that_ends_while_its_engine_is_idle_is_noticed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "IDLE_CHECK_S", 0.5)
    async with generating(model_dir, process="own") as made:
        await made.serve(1)
        version, killed = made.version(2), made.engine.current
        assert isinstance(killed, ProcessEngine)
        os.kill(killed.process_id, signal.SIGKILL)
        await until(lambda: made.value("engine_restarts_total") == 1)
        assert made.lost == ["words", "requests"]
        # Made once the engine is there again.
        await made.hand_over(lambda: version)
        assert made.policy.served == version
        made.add("next", SHORT)
        assert (await made.finished.get()).request_id == "next"


async def test_an_engine_that_hangs_in_this_process_ends_its_thread_and_is_not_waited_for(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned: list[str] = []
    monkeypatch.setattr(engine_thread, "abandon", abandoned.append)
    made: list[Generating] = []

    async def hang() -> None:
        async with generating(model_dir, step_limit_s=2.0) as hanging:
            made.append(hanging)
            await hanging.serve(1)
            hanging.add("first", SHORT)
            await hanging.finished.get()
            hanging.faults.write_text("hang")
            hanging.add("lost", LONG)
            await asyncio.Event().wait()

    try:
        with pytest.raises(ExceptionGroup) as ended:
            await hang()
    finally:
        (model_dir / "faults").unlink(missing_ok=True)
    [error] = ended.value.exceptions
    assert isinstance(error, EngineHungError)
    assert "longer than engine_step_limit_s = 2" in str(error)
    assert abandoned == ["engine"]
    assert made[0].value("engine_restarts_total") == 0


async def test_a_version_without_finite_logprobs_is_not_sampled_from(model_dir: Path) -> None:
    async with generating(model_dir) as made:
        layout = made.engine.layout

        def change() -> PolicyVersion:
            nothing = ArrayWords(np.full(layout.words, 0x7FC0, np.uint16))
            copy_words(nothing, made.engine.weights.live, layout=layout)
            made.engine.weights.settle()
            return made.version(2)

        await made.serve(1)
        base = words_of(made.engine.weights.live, layout=layout)
        for faults in (1, 2):
            made.add(f"drawn from nothing {faults}", SHORT)
            await made.hand_over(change)
            await until(lambda: made.value("probe_failures_total") == faults)  # noqa: B023
            await until(lambda: made.policy.served is None)
        assert made.value("engine_restarts_total") == 1
        assert made.lost == ["words", "requests", "requests"]
        copy_words(ArrayWords(base), made.engine.weights.live, layout=layout)
        await made.serve(3)
        made.engine_thread.cancel(["drawn from nothing 2"])
        made.add("good", SHORT)
        assert (await made.finished.get()).request_id == "good"
