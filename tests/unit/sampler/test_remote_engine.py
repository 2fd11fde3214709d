"""The remote engine at a server over real HTTP: well, dead, silent, stuck, garbled, started again."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.errors import Reason, RefusedError, StartupError
from node.rollout import Finish, SamplingParameters
from sampler.engines.engine import Engine, FinishedRequest, GenerationRequest
from sampler.engines.model_words import ArrayWords, copy_words, version_of
from sampler.engines.remote.frame_memory import DIRECTORY_VARIABLE
from sampler.engines.remote.remote_engine import RemoteEngine
from sampler.engines.remote.remote_options import RemoteOptions
from sampler.engines.remote.vllm_server import GENERATE, ServerError
from sampler.engines.restartable_engine import RestartableEngine
from support.model_words import words_of
from support.tiny_model import make_tiny_model
from support.vllm_stub import Call, VllmStub, listening, stub_of

PLAIN = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def server(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmStub]:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "weights"))
    with listening(stub_of(model_dir)) as stub:
        yield stub


@pytest.fixture
def loaded() -> Iterator[list[RemoteEngine]]:
    """Engines that are closed after the test."""
    engines: list[RemoteEngine] = []
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
def load(server: VllmStub, loaded: list[RemoteEngine], tmp_path: Path) -> Callable[..., RemoteEngine]:
    """Connects to the server."""

    def connected(**options: Any) -> RemoteEngine:
        given = {"address": server.address, "weights_dir": tmp_path / "weights", "poll_s": 0.02}
        engine = RemoteEngine(
            server.model_dir,
            compute_dtype="float32",
            seed=0,
            options=RemoteOptions.model_validate(given | {"start_limit_s": 5, "answer_limit_s": 5} | options),
        )
        loaded.append(engine)
        return engine

    return connected


def asked(
    request_id: str = "a", *, completions: int = 1, sampling: SamplingParameters = PLAIN
) -> GenerationRequest:
    return GenerationRequest(request_id, np.array([5, 6], np.int32), completions, sampling)


def run_out(engine: Engine) -> dict[str, FinishedRequest]:
    finished: dict[str, FinishedRequest] = {}
    while engine.running:
        finished |= {request.request_id: request for request in engine.step()}
    return finished


def test_completions_come_as_the_server_drew_them(
    server: VllmStub, load: Callable[..., RemoteEngine]
) -> None:
    engine = load()
    engine.serve(3)
    engine.add(asked(completions=6, sampling=replace(PLAIN, top_k=2)))
    completions = run_out(engine)["a"].completions
    assert len(completions) == 6  # of which the server batches 4
    for completion in completions:
        assert completion.token_ids.tolist() == [5, 1]
        assert completion.behaviour_logprob.tolist() == [-0.5, -0.25]
        assert completion.policy_version.tolist() == [3, 3]
        assert completion.finish is Finish.END
        assert completion.kept_mass is not None
        assert completion.kept_mass.tolist() == [0.5, 1.0]
    assert engine.step() == []


def test_a_logprob_that_is_no_number_is_told_as_such(
    server: VllmStub, load: Callable[..., RemoteEngine]
) -> None:
    """The server says -9999 for it, and the probe of a version looks for what is not finite."""
    engine = load()
    content = [{"token_id": 5, "logprob": -9999.0, "rank": None}]
    server.answers[GENERATE] = lambda call: call.send(
        server.completions(
            call,
            token_ids=[5],
            logprobs={"content": content},
            weight_versions=[{"version": server.version, "start": 0, "end": 1}],
        )
    )
    engine.add(asked())
    [completion] = run_out(engine)["a"].completions
    assert np.isnan(completion.behaviour_logprob).all()


def test_words_are_written_between_a_pause_and_the_naming_of_their_version(
    server: VllmStub, load: Callable[..., RemoteEngine]
) -> None:
    engine = load()
    words = np.roll(server.base, 1)
    del server.calls[:]
    copy_words(ArrayWords(words), engine.weights.live, layout=engine.layout)
    engine.weights.settle()
    engine.serve(1)
    frames = len(engine.layout.frames)
    assert server.calls == [
        "/pause",
        *frames * ["move_frames"],
        "settle_frames",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]
    np.testing.assert_array_equal(server.words, words)
    np.testing.assert_array_equal(words_of(engine.weights.live, layout=engine.layout), words)
    assert version_of(1, engine.weights.live, layout=engine.layout) == version_of(
        1, ArrayWords(words), layout=engine.layout
    )
    with pytest.raises(ValueError, match="older"):
        engine.serve(0)


def test_a_kept_cache_is_not_dropped(server: VllmStub, load: Callable[..., RemoteEngine]) -> None:
    load(kv_cache="keep").serve(1)
    assert "/reset_prefix_cache" not in server.calls


def test_nothing_is_left_in_the_weights_directory_but_the_lock(
    load: Callable[..., RemoteEngine], tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir(mode=0o700)
    (weights / "frames-0123").write_bytes(b"of a sampler that was killed")
    engine = load()
    assert os.listdir(weights) == ["lock"]
    assert weights.stat().st_mode & 0o777 == 0o700
    assert version_of(0, engine.weights.live, layout=engine.layout).number == 0


def test_a_second_sampler_is_refused(load: Callable[..., RemoteEngine]) -> None:
    load()
    with pytest.raises(StartupError, match=r"is in use by process \d+.*weights_dir of its own"):
        load()


def test_a_sampler_with_another_directory_than_the_servers_leaves_it_as_it_is(
    server: VllmStub, load: Callable[..., RemoteEngine], tmp_path: Path
) -> None:
    engine = load()
    with pytest.raises(StartupError, match=r"cannot be used: .*No such file"):
        load(weights_dir=tmp_path / "other")
    engine.cancel([])
    engine.add(asked())
    assert set(run_out(engine)) == {"a"}


def test_a_cancelled_request_is_hung_up_on(server: VllmStub, load: Callable[..., RemoteEngine]) -> None:
    engine = load()
    server.answers[GENERATE] = Call.hang
    engine.add(asked("a"))
    engine.add(asked("b"))
    assert engine.step() == []
    assert (engine.running, engine.waiting) == (2, 2)
    engine.cancel(["a", "unknown"])
    assert server.hung_up.acquire(timeout=10)
    assert engine.running == 1


def test_a_request_waits_until_it_has_a_token(server: VllmStub, load: Callable[..., RemoteEngine]) -> None:
    engine = load()
    server.answers[GENERATE] = Call.hang
    engine.add(asked("a"))
    engine.add(asked("b"))
    server.drawn = {"1": 0, "2": 3}
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)


def test_what_does_not_fit_is_refused(load: Callable[..., RemoteEngine]) -> None:
    engine = load()
    with pytest.raises(RefusedError, match="takes 256 together") as caught:
        engine.add(asked(sampling=replace(PLAIN, max_new_tokens=255)))
    assert caught.value.reason is Reason.OVER_LIMIT


def answer_of(**fields: Any) -> Callable[[Call], None]:
    return lambda call: call.send(call.server.completions(call, **fields))


def span(version: str, end: int = 2) -> list[dict[str, Any]]:
    return [{"version": version, "start": 0, "end": end}]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Call.end, "cannot be reached"),
        (lambda call: call.send({"error": "died"}, status=500), "HTTP 500"),
        (lambda call: call.send_bytes(b"<html>"), "does not answer with JSON"),
        (lambda call: call.send_bytes(b"[" * 100_000), "does not answer with JSON"),
        (lambda call: call.send_bytes(b" " * (2 << 20)), "more than 1052672 bytes"),
        (lambda call: call.send([1]), "otherwise than vLLM"),
        (lambda call: call.send({"choices": []}), "0 completions instead of 1"),
        (answer_of(weight_versions=span("default")), "not of this session"),
        (answer_of(weight_versions=span(f"{'0' * 32}.0")), "not of this session"),
        (answer_of(weight_versions=[]), "of no version"),
        (answer_of(weight_versions=None), "otherwise than vLLM"),
        (answer_of(finish_reason="abort"), "abort"),
        (answer_of(token_ids=[5, 6]), "or those of others"),
        (answer_of(token_ids=[]), "a completion of 0 tokens"),
        (answer_of(token_ids=[1 << 40, 1]), "otherwise than vLLM"),
        (answer_of(logprobs=None), "otherwise than vLLM"),
    ],
)
def test_an_answer_that_cannot_be_is_a_fault_of_the_engine(
    server: VllmStub, load: Callable[..., RemoteEngine], answer: Callable[[Call], None], said: str
) -> None:
    engine = load()
    server.answers[GENERATE] = answer
    engine.add(asked())
    with pytest.raises(ServerError, match=said):
        run_out(engine)


def test_a_server_that_was_started_again_is_found_whatever_is_asked(
    server: VllmStub, load: Callable[..., RemoteEngine]
) -> None:
    engine = load()
    engine.serve(1)
    server.restart()
    frame = engine.layout.frames[0]
    for call in (
        lambda: engine.cancel([]),
        lambda: engine.weights.live.read(frame),
        lambda: engine.weights.live.write(frame, np.zeros(frame.words, np.uint16)),
        engine.weights.settle,
    ):
        with pytest.raises(ServerError, match="started again"):
            call()
    np.testing.assert_array_equal(server.words, server.base)
    engine.add(asked())
    with pytest.raises(ServerError, match=r"not of this session|started again"):
        run_out(engine)


def test_an_engine_that_failed_is_connected_to_again_and_knows_no_request_of_before(
    server: VllmStub, load: Callable[..., RemoteEngine], loaded: list[RemoteEngine]
) -> None:
    engine = RestartableEngine(load)
    engine.serve(1)
    copy_words(ArrayWords(np.roll(server.base, 1)), engine.weights.live, layout=engine.layout)
    server.answers[GENERATE] = Call.end
    engine.add(asked())
    with pytest.raises(ServerError, match="cannot be reached"):
        run_out(engine)
    del server.answers[GENERATE]
    del loaded[0]
    engine.restart()
    np.testing.assert_array_equal(words_of(engine.weights.live, layout=engine.layout), server.base)
    assert engine.running == 0
    engine.serve(2)
    engine.add(asked("b"))
    finished = run_out(engine)
    assert set(finished) == {"b"}
    assert finished["b"].completions[0].policy_version.tolist() == [2, 2]


def test_a_server_that_draws_no_tokens_hangs(server: VllmStub, load: Callable[..., RemoteEngine]) -> None:
    engine = load(answer_limit_s=0.3)
    server.answers[GENERATE] = Call.hang
    engine.add(asked())
    with pytest.raises(ServerError, match=r"drew no token for 1 requests within 0\.3 s"):
        run_out(engine)


def test_a_server_that_does_not_answer_hangs(server: VllmStub, load: Callable[..., RemoteEngine]) -> None:
    engine = load(answer_limit_s=0.3)
    server.answers["/pause"] = Call.hang
    with pytest.raises(ServerError, match=r"/pause.* does not answer within 0\.3 s"):
        engine.serve(1)


def test_a_session_is_over_once_a_frame_was_not_moved_in_time(
    server: VllmStub, load: Callable[..., RemoteEngine]
) -> None:
    """The server may move it later, into memory that is used for another by then."""
    engine = load(answer_limit_s=0.3)
    server.answers["move_frames"] = Call.hang
    with pytest.raises(ServerError, match="does not answer"):
        engine.weights.live.read(engine.layout.frames[0])
    del server.answers["move_frames"]
    for call in (lambda: engine.cancel([]), lambda: engine.weights.live.read(engine.layout.frames[0])):
        with pytest.raises(ServerError, match="does not answer"):
            call()


def test_whoever_reads_words_when_the_connection_is_closed_is_told(
    server: VllmStub, load: Callable[..., RemoteEngine], loaded: list[RemoteEngine]
) -> None:
    engine = load()
    words, frame, is_reading = engine.weights, engine.layout.frames[0], threading.Event()

    def hang(call: Call) -> None:
        is_reading.set()
        call.hang()

    server.answers["move_frames"] = hang
    errors = []

    def read() -> None:
        try:
            words.live.read(frame)
        except ServerError as error:
            errors.append(str(error))

    reading = threading.Thread(target=read)
    reading.start()
    assert is_reading.wait(10)
    loaded.pop().close()
    reading.join(10)
    read()
    assert len(errors) == 2
    assert all("closed" in error for error in errors)


def test_a_server_that_starts_late_is_waited_for(
    server: VllmStub, load: Callable[..., RemoteEngine], caplog: pytest.LogCaptureFixture
) -> None:
    tries = [Call.end, refusing(503)]

    def described(call: Call) -> None:
        if len(tries) == 1:
            del server.answers["describe_server"]
        tries.pop(0)(call)

    server.answers["describe_server"] = described
    engine = load()
    assert "waiting for the vLLM server" in caplog.text
    engine.add(asked())
    assert set(run_out(engine)) == {"a"}


def refusing(status: int) -> Callable[[Call], None]:
    return lambda call: call.send({"error": "no"}, status=status)


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        (GENERATE, refusing(401), "Set api_key_file"),
        (GENERATE, refusing(403), "--enable-scale-out"),
        ("describe_server", refusing(404), "VLLM_SERVER_DEV_MODE=1"),
        ("offer_memory", lambda call: call.send({"results": ["no"]}), "refuses offer_memory: no"),
        ("describe_server", refusing(500), "--worker-extension-cls sampler.engines.remote.server_worker"),
        ("describe_server", lambda call: call.send({"results": None}), "with results"),
        ("describe_server", lambda call: call.send({"results": [None]}), "data_parallel = None"),
        ("begin_session", lambda call: call.send({"results": [{}]}), "otherwise than vLLM"),
        ("begin_session", lambda call: call.send({"results": ["it ties weights"]}), "it ties weights"),
        ("/reset_prefix_cache", lambda call: call.send({"success": False}), "otherwise than vLLM"),
        ("/update_weight_version", Call.end, "cannot be reached.*Start it, or correct address"),
        (GENERATE, lambda call: call.send({"choices": []}), "0 completions instead of 1"),
    ],
)
def test_a_server_that_cannot_be_used_is_a_startup_error_that_says_what_to_do(
    server: VllmStub,
    load: Callable[..., RemoteEngine],
    path: str,
    answer: Callable[[Call], None],
    said: str,
) -> None:
    server.answers[path] = answer
    with pytest.raises(StartupError, match=said):
        load(start_limit_s=2)


def test_what_is_no_vllm_server_is_not_waited_for(
    server: VllmStub, load: Callable[..., RemoteEngine]
) -> None:
    server.answers["describe_server"] = lambda call: call.send_bytes(b"<html>")
    with pytest.raises(StartupError, match="does not answer with JSON"):
        load()
    assert server.calls == ["describe_server"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "bfloat16"}, "--dtype float32"),
        ({"async_scheduling": True}, "--no-async-scheduling"),
        ({"v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"speculative_decoding": True}, "without --speculative-config"),
        ({"pipeline_parallel": 2}, "--tensor-parallel-size"),
        ({"data_parallel": 2}, "for each replica"),
        ({"workers": 2}, "for each replica"),
    ],
)
def test_a_server_with_a_wrong_setting_is_refused_before_its_words_are_touched(
    server: VllmStub, load: Callable[..., RemoteEngine], settings: dict[str, Any], said: str
) -> None:
    server.settings = settings
    with pytest.raises(StartupError, match=said):
        load()
    assert "begin_session" not in server.calls


def test_a_server_of_another_model_is_refused(
    server: VllmStub, load: Callable[..., RemoteEngine], tmp_path: Path
) -> None:
    server.layout = stub_of(make_tiny_model(tmp_path / "other", hidden=32)).layout
    with pytest.raises(StartupError, match=r"another model than sampler\.model_dir"):
        load()


def test_the_key_is_sent_and_not_in_the_configuration(
    server: VllmStub, load: Callable[..., RemoteEngine], tmp_path: Path
) -> None:
    with pytest.raises(
        StartupError, match=r"no API key that can be read.*api_key_file in sampler\.engine_opt"
    ):
        load(api_key_file=tmp_path / "nowhere")
    key = tmp_path / "key"
    key.write_text("sesame\n")
    load(api_key_file=key)
    assert server.keys == {"Bearer sesame"}


def test_a_directory_that_others_may_enter_is_refused(
    load: Callable[..., RemoteEngine], tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir(mode=0o755)
    with pytest.raises(StartupError, match=r"mode 0700, and has owner \d+ and mode 0755"):
        load()
