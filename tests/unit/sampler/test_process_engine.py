"""An engine's own process: what it says, and what is left when it ends in the wrong moment."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from node.errors import ConfigError, Reason, RefusedError, StartupError
from node.values.groups.rollout import Completion, Finish
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.engine import GenerationRequest
from sampler.engines.own_process import process_engine
from sampler.engines.own_process.messages import (
    error_from,
    error_message,
    receive,
    request_from,
    send,
)
from sampler.engines.own_process.process_engine import ProcessEngine
from sampler.engines.restartable_engine import EngineEndedError
from sampler.engines.stepping import RequestChange, StepResults, step_on
from support.refusals import cannot_start, misconfigured, naming
from support.step_exchanges import Scripted
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("warm_engines")

SAMPLING = SamplingParameters(0.7, 0.9, 5, max_new_tokens=200, min_p=0.01, stop=("a\n", "b"))
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), hidden=32, layers=1)


def started(model_dir: Path, *, step_limit_s: float = LIMIT_S) -> ProcessEngine:
    return ProcessEngine("torch", SamplerConfig(model_dir=model_dir, threads=1), step_limit_s=step_limit_s)


@pytest.fixture
def engine(model_dir: Path) -> Iterator[ProcessEngine]:
    made = started(model_dir)
    yield made
    made.close()
    assert not psutil.pid_exists(made.process_id)


def sent(message: Any) -> Any:
    ours, theirs = Pipe()
    send(ours, message)
    return receive(theirs)


def test_requests_and_completions_arrive_as_they_were() -> None:
    request = GenerationRequest("a", np.arange(3, dtype=np.int32), 4, SAMPLING)
    back = request_from(sent(request))
    assert (back.request_id, back.wanted, back.sampling) == ("a", 4, SAMPLING)
    np.testing.assert_array_equal(back.prompt_token_ids, request.prompt_token_ids)
    drawn = Completion(
        np.array([7, 8], np.int32),
        np.array([-0.1, np.nan], np.float32),
        np.array([3, 4], np.int32),
        Finish.STOP,
        np.array([0.5, 1.0], np.float32),
    )
    whole = replace(drawn, kept_mass=None, finish=Finish.END)
    finished = [
        replace(request, completions=(drawn, whole)),
        replace(request, request_id="b", completions=(whole,)),
    ]
    told = [request_from(fields) for fields in sent(finished)]
    assert [one.request_id for one in told] == ["a", "b"]
    for group, expected in zip(told, finished, strict=True):
        for one, other in zip(group.completions, expected.completions, strict=True):
            assert one.finish is other.finish
            for name in ("token_ids", "behaviour_logprob", "policy_version", "kept_mass"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    "error",
    [
        RefusedError(Reason.OVER_LIMIT, "too long", fix="shorten it"),
        StartupError("no device", fix="Buy one."),
        ConfigError(key="k", value="v", source="here", rule="must not", fix="Do not."),
        ValueError("version 0 is older"),
        RuntimeError("RuntimeError: broken"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_mean_the_same_on_the_other_side(error: Exception) -> None:
    told = error_from(sent(error_message(error)))
    assert type(told) is type(error)
    assert str(error) in str(told)


def test_a_process_that_is_killed_is_an_engine_that_has_ended(engine: ProcessEngine) -> None:
    os.kill(engine.process_id, signal.SIGKILL)
    with naming(EngineEndedError, "-9"):
        engine.weights.read(engine.layout.frames[0])
    with naming(EngineEndedError, "-9"):
        engine.step()


@pytest.mark.timeout(60)
def test_words_that_are_read_after_the_end_are_an_error_and_no_endless_wait(model_dir: Path) -> None:
    engine = started(model_dir)
    words, frame = engine.weights, engine.layout.frames[0]
    held = words.read(frame)
    engine.close()
    for _ in range(3):
        with pytest.raises(EngineEndedError, match="has ended"):
            words.read(frame)
        with pytest.raises(EngineEndedError, match="has ended"):
            words.write(frame, held)


@pytest.mark.parametrize("call", ["step", "add"])
def test_a_process_that_does_not_answer_in_time_is_killed(model_dir: Path, call: str) -> None:
    engine = started(model_dir, step_limit_s=1.0)
    os.kill(engine.process_id, signal.SIGSTOP)
    if call == "step":
        with naming(EngineEndedError, "1 s", "-9"):
            engine.step()
    else:
        # More than the connection takes without a reader.
        long = GenerationRequest("a", np.zeros(1 << 20, np.int32), 1, SAMPLING)
        with naming(EngineEndedError, "-9"):
            engine.add(long)
    assert not psutil.pid_exists(engine.process_id)
    engine.close()


def test_requests_come_and_go_while_the_process_steps_on(engine: ProcessEngine) -> None:
    prompt = engine.tokenizer.encode("1+1=")
    short = replace(SAMPLING, max_new_tokens=3)
    groups = [GenerationRequest(str(number), prompt, 8, short) for number in range(64)]
    # Longer than the connection takes, as are the results: neither end may wait for the other.
    long = [GenerationRequest(f"long {n}", np.zeros(1 << 19, np.int32), 1, short) for n in range(4)]
    changes: list[list[RequestChange]] = [[one, groups[0].request_id] for one in long]
    exchange = Scripted(groups, *changes)
    while not exchange.told or engine.running:
        step_on(engine, exchange)
    assert {*exchange.finished} | {"0"} == {request.request_id for request in groups}
    refused = {name: error.reason for results in exchange.told for name, error in results.refused}
    assert refused == {one.request_id: Reason.OVER_LIMIT for one in long}


def test_a_process_that_hangs_while_it_steps_on_is_killed(model_dir: Path) -> None:
    engine = started(model_dir, step_limit_s=1.0)

    class Stopping(Scripted):
        def tell(self, results: StepResults) -> None:
            os.kill(engine.process_id, signal.SIGSTOP)

    prompt = engine.tokenizer.encode("1+1=")
    with naming(EngineEndedError, "1 s", "-9"):
        step_on(engine, Stopping([GenerationRequest("a", prompt, 32, SAMPLING)]))
    assert not psutil.pid_exists(engine.process_id)
    engine.close()


def test_what_keeps_an_engine_from_loading_is_said_here(model_dir: Path, tmp_path: Path) -> None:
    own = SamplerConfig(model_dir=model_dir, engine="support.failing_engine:no_such")
    with misconfigured("no_such", key="sampler.engine"):
        ProcessEngine(own.engine, own, step_limit_s=LIMIT_S)
    spare = SamplerConfig(model_dir=model_dir, apply="spare")
    with cannot_start("sampler.apply", "sampler.engine_process"):
        ProcessEngine("torch", spare, step_limit_s=LIMIT_S)


def test_what_an_engine_prints_is_an_event_of_its_sampler(
    model_dir: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    settings = SamplerConfig(model_dir=model_dir, engine="support.failing_engine:print_and_exit")
    with cannot_start("7"):
        ProcessEngine(settings.engine, settings, step_limit_s=LIMIT_S)
    told = [vars(record) for record in caplog.records if record.message == "printed"]
    assert [(one["program"], one["text"]) for one in told] == [
        ("engine", "\\x1b[2J"),
        ("engine", '{"event": 1}'),
    ]
    assert capfd.readouterr() == ("", "")


def test_a_process_that_cannot_be_started_leaves_no_descriptor_open(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(process_engine, "Popen", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        started(model_dir)
    assert len(os.listdir("/proc/self/fd")) == before
