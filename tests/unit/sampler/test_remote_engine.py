"""The remote engine at a server over real HTTP: well, dead, silent, stuck, garbled, started again."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.errors import Reason
from node.values.groups.rollout import Finish
from sampler.engines.engine import EngineUse
from sampler.engines.remote import remote_engine
from sampler.engines.remote.remote_engine import RemoteEngine
from sampler.engines.remote.vllm_server import GENERATE, ServerError
from sampler.engines.restartable_engine import RestartableEngine
from sampler.engines.words.model_words import ArrayWords, copy_words, version_of
from support.model_words import words_of
from support.refusals import naming, refused
from support.remote_engines import PLAIN, Connect, asked, run_out
from support.vllm_stub import Call, VllmStub


def test_completions_come_as_the_server_drew_them(server: VllmStub, connect: Connect) -> None:
    engine = connect()
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


def test_a_logprob_that_is_no_number_is_told_as_such(server: VllmStub, connect: Connect) -> None:
    """The server says -9999 for it, and the probe of a version looks for what is not finite."""
    engine = connect()
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
    server: VllmStub, connect: Connect
) -> None:
    engine = connect()
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


def test_a_kept_cache_is_not_dropped(server: VllmStub, connect: Connect) -> None:
    connect(kv_cache="keep").serve(1)
    assert "/reset_prefix_cache" not in server.calls


def test_nothing_is_left_in_the_weights_directory_but_the_lock(connect: Connect, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir(mode=0o700)
    (weights / "frames-0123").write_bytes(b"of a sampler that was killed")
    engine = connect()
    assert os.listdir(weights) == ["lock"]
    assert weights.stat().st_mode & 0o777 == 0o700
    assert version_of(0, engine.weights.live, layout=engine.layout).number == 0


def test_a_request_waits_until_it_has_a_token_and_is_hung_up_on_when_it_is_cancelled(
    server: VllmStub, connect: Connect
) -> None:
    engine = connect()
    server.answers[GENERATE] = Call.hang
    engine.add(asked("a"))
    engine.add(asked("b"))
    assert engine.step() == []
    assert (engine.running, engine.waiting) == (2, 2)
    server.drawn = {"1": 0, "2": 3}
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)
    engine.cancel(["a", "unknown"])
    assert server.hung_up.acquire(timeout=10)
    assert engine.running == 1


GAUGES = b"""# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
vllm:kv_cache_usage_perc{engine="0",model_name="a {b} 7"} 5e-02
vllm:num_requests_running{engine="0",model_name="a {b} 7"} 3.0
vllm:num_requests_waiting{engine="0",model_name="a {b} 7"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
"""


def test_it_is_as_full_as_the_servers_metrics_say_else_as_what_is_asked_of_it(
    server: VllmStub, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "GAUGES_S", 0.0)
    engine = connect()
    server.answers[GENERATE] = Call.hang
    for name in "ab":
        engine.add(asked(name, completions=5))
    for metrics, use in (
        (GAUGES, EngineUse(0.05, 3 / 4)),  # some places are free
        (GAUGES.replace(b"} 0.0", b"} 2.0"), EngineUse(0.05, 10 / 8)),  # some requests wait
        (b"", EngineUse(0.0, 1.0)),
        (b"vllm:kv_cache_usage_perc{} NaN\n\xff", EngineUse(0.0, 1.0)),
    ):
        server.metrics = metrics
        engine.step()
        assert engine.use == use


def test_what_does_not_fit_is_refused(connect: Connect) -> None:
    engine = connect()
    with refused(Reason.OVER_LIMIT, "256"):
        engine.add(asked(sampling=replace(PLAIN, max_new_tokens=255)))


def answer_of(**fields: Any) -> Callable[[Call], None]:
    return lambda call: call.send(call.server.completions(call, **fields))


def span(version: str, end: int = 2) -> list[dict[str, Any]]:
    return [{"version": version, "start": 0, "end": end}]


WRONG: list[tuple[Callable[[Call], None], str]] = [
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
]


def test_an_answer_that_cannot_be_is_a_fault_of_the_engine(server: VllmStub, connect: Connect) -> None:
    engine = connect()
    for answer, said in WRONG:
        server.answers[GENERATE] = answer
        engine.add(asked())
        with pytest.raises(ServerError, match=said):
            run_out(engine)


def test_a_server_that_was_started_again_is_found_whatever_is_asked(
    server: VllmStub, connect: Connect
) -> None:
    engine = connect()
    engine.serve(1)
    server.restart()
    frame = engine.layout.frames[0]
    for call in (
        lambda: engine.cancel([]),
        lambda: engine.weights.live.read(frame),
        lambda: engine.weights.live.write(frame, np.zeros(frame.words, np.uint16)),
        engine.weights.settle,
    ):
        with naming(ServerError, "started again"):
            call()
    np.testing.assert_array_equal(server.words, server.base)
    engine.add(asked())
    with pytest.raises(ServerError, match=r"not of this session|started again"):
        run_out(engine)


def test_an_engine_that_failed_is_connected_to_again_and_knows_no_request_of_before(
    server: VllmStub, connect: Connect, engines: list[RemoteEngine]
) -> None:
    engine = RestartableEngine(connect)
    engine.serve(1)
    copy_words(ArrayWords(np.roll(server.base, 1)), engine.weights.live, layout=engine.layout)
    server.answers[GENERATE] = Call.end
    engine.add(asked())
    with naming(ServerError, "generate"):
        run_out(engine)
    del server.answers[GENERATE]
    del engines[0]
    engine.restart()
    np.testing.assert_array_equal(words_of(engine.weights.live, layout=engine.layout), server.base)
    assert engine.running == 0
    engine.serve(2)
    engine.add(asked("b"))
    finished = run_out(engine)
    assert set(finished) == {"b"}
    assert finished["b"].completions[0].policy_version.tolist() == [2, 2]


def test_a_server_that_draws_no_tokens_or_does_not_answer_hangs(server: VllmStub, connect: Connect) -> None:
    engine = connect(answer_limit_s=0.3)
    server.answers |= {GENERATE: Call.hang, "/pause": Call.hang}
    engine.add(asked())
    with naming(ServerError, "1", "0.3 s"):
        run_out(engine)
    with naming(ServerError, "/pause", "0.3 s"):
        engine.serve(1)


def test_a_session_is_over_once_a_frame_was_not_moved_in_time(server: VllmStub, connect: Connect) -> None:
    """The server may move it later, into memory that is used for another by then."""
    engine = connect(answer_limit_s=0.3)
    server.answers["move_frames"] = Call.hang
    with naming(ServerError, "0.3 s"):
        engine.weights.live.read(engine.layout.frames[0])
    del server.answers["move_frames"]
    for call in (lambda: engine.cancel([]), lambda: engine.weights.live.read(engine.layout.frames[0])):
        with naming(ServerError, "0.3 s"):
            call()


def test_whoever_reads_words_when_the_connection_is_closed_is_told(
    server: VllmStub, connect: Connect, engines: list[RemoteEngine]
) -> None:
    engine = connect()
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
    engines.pop().close()
    reading.join(10)
    read()
    assert len(errors) == 2
    assert all("closed" in error for error in errors)
