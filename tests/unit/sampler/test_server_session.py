"""The remote engine connects to a server over real HTTP: which it waits for, and which it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sampler.engines.remote import server_session
from sampler.engines.remote.vllm_server import GENERATE
from support.refusals import cannot_start
from support.remote_engines import Connect, asked, run_out
from support.tiny_model import make_tiny_model
from support.vllm_stub import Call, VllmStub, stub_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_session, "RETRY_S", 0.02)


def test_a_server_that_starts_late_is_waited_for(
    server: VllmStub, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    tries = [Call.end, refusing(503)]

    def described(call: Call) -> None:
        if len(tries) == 1:
            del server.answers["describe_server"]
        tries.pop(0)(call)

    server.answers["describe_server"] = described
    engine = connect()
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
        ("describe_server", refusing(500), "--worker-extension-cls sampler.engines.vllm.vllm_worker"),
        ("describe_server", lambda call: call.send({"results": None}), "with results"),
        ("describe_server", lambda call: call.send({"results": [None]}), "data_parallel = None"),
        ("begin_session", lambda call: call.send({"results": [{}]}), "otherwise than vLLM"),
        ("begin_session", lambda call: call.send({"results": ["it ties weights"]}), "it ties weights"),
        ("/reset_prefix_cache", lambda call: call.send({"success": False}), "otherwise than vLLM"),
        ("/update_weight_version", Call.end, "correct address"),
        (GENERATE, lambda call: call.send({"choices": []}), "0 completions instead of 1"),
    ],
)
def test_a_server_that_cannot_be_used_is_a_startup_error_that_says_what_to_do(
    server: VllmStub,
    connect: Connect,
    path: str,
    answer: Callable[[Call], None],
    said: str,
) -> None:
    server.answers[path] = answer
    with cannot_start(said):
        connect(start_limit_s=0.5)


def test_what_is_no_vllm_server_is_not_waited_for(server: VllmStub, connect: Connect) -> None:
    server.answers["describe_server"] = lambda call: call.send_bytes(b"<html>")
    with cannot_start("JSON"):
        connect()
    assert server.calls == ["describe_server"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "bfloat16"}, "--dtype float32"),
    ({"async_scheduling": True}, "--no-async-scheduling"),
    ({"v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    ({"speculative_decoding": True}, "without --speculative-config"),
    ({"pipeline_parallel": 2}, "--tensor-parallel-size"),
    ({"data_parallel": 2}, "for each replica"),
    ({"workers": 2}, "for each replica"),
]


def test_a_server_with_a_wrong_setting_is_refused_before_its_words_are_touched(
    server: VllmStub, connect: Connect
) -> None:
    for settings, said in WRONG:
        server.settings = settings
        with cannot_start(said):
            connect()
    assert "begin_session" not in server.calls


def test_a_server_of_another_model_or_with_another_tokenizer_is_refused_by_what_differs(
    server: VllmStub, connect: Connect, tmp_path: Path
) -> None:
    """It looks for stop strings in the texts of its own tokenizer."""
    server.tokenizer_dir = Path(shutil.copytree(server.model_dir, tmp_path / "served"))
    settings = json.loads((server.model_dir / "tokenizer_config.json").read_text())
    settings["eos_token"] = "="
    (server.tokenizer_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    with cannot_start("tokenizer_config.json", "eos_token", '"="'):
        connect()
    server.layout = stub_of(make_tiny_model(tmp_path / "other", hidden=32)).layout
    with cannot_start("sampler.model_dir"):
        connect()


def test_the_key_is_sent_and_not_in_the_configuration(
    server: VllmStub, connect: Connect, tmp_path: Path
) -> None:
    with cannot_start("nowhere", "api_key_file"):
        connect(api_key_file=tmp_path / "nowhere")
    key = tmp_path / "key"
    key.write_text("sesame\n")
    connect(api_key_file=key)
    assert server.keys == {"Bearer sesame"}


def test_a_directory_that_others_may_enter_is_refused(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir(mode=0o755)
    with cannot_start("0700", "0755"):
        connect()


def test_a_second_sampler_is_refused_and_with_another_directory_leaves_the_servers_as_it_is(
    connect: Connect, tmp_path: Path
) -> None:
    engine = connect()
    with cannot_start("process", "weights_dir"):
        connect()
    with cannot_start("No such file"):
        connect(weights_dir=tmp_path / "other")
    engine.cancel([])
    engine.add(asked())
    assert set(run_out(engine)) == {"a"}
