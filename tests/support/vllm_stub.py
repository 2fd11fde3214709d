"""The part of a vLLM server that a sampler needs, with real HTTP and shared memory, in the test's process.

Its words are the model's files; its completions are made up. Tests replace answers by their path, or by the
method of the workers.
"""

import functools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch

from node.text.text_rules import TextRules
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from sampler.engines.torch.torch_engine import TorchEngine
from sampler.engines.words.frame_memory import Rooms, open_frame_memory
from sampler.engines.words.model_words import ArrayWords
from sampler.engines.words.shared_words import move_frames
from support.http_server import served
from support.model_words import words_of

PATIENCE_S = 20.0
END_ID = 1


@dataclass
class Call:
    """A request in progress."""

    server: "VllmStub"
    handler: BaseHTTPRequestHandler
    path: str
    body: Any

    def send(self, answer: object, *, status: int = 200) -> None:
        self.send_bytes(json.dumps(answer).encode(), status=status)

    def send_bytes(self, data: bytes, *, status: int = 200) -> None:
        self.handler.send_response(status)
        self.handler.send_header("Content-Length", str(len(data)))
        self.handler.end_headers()
        self.handler.wfile.write(data)

    def hang(self) -> None:
        """Answer when the test is over, or the other side has hung up."""
        self.handler.connection.settimeout(PATIENCE_S)
        try:
            self.handler.connection.recv(1)
        except OSError:
            return
        self.server.hung_up.release()

    def end(self) -> None:
        """Close the connection, as a server that dies does."""
        self.handler.close_connection = True


@dataclass
class VllmStub:
    """A server, what was asked of it, and what it answers instead of what it should."""

    model_dir: Path
    layout: Layout
    base: Words
    address: str = ""
    answers: dict[str, Callable[[Call], None]] = field(default_factory=dict)
    """By path or by method of the workers."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings other than those a sampler needs."""
    tokenizer_dir: Path | None = None
    """None: ``model_dir``."""
    calls: list[str] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    hung_up: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    drawn: dict[str, int] = field(default_factory=dict)
    metrics: bytes = b""
    """Empty: the server was told to show none."""
    words: Words = field(init=False)
    version: str = "default"
    session: str = ""
    is_paused: bool = False
    rooms: Rooms = field(init=False)

    def restart(self) -> None:
        """Forget everything, as a new process does."""
        self.words, self.version, self.session, self.is_paused = self.base.copy(), "default", "", False

    def answer(self, call: Call) -> None:
        path = call.path.partition("?")[0]
        if path == "/metrics":
            return call.send_bytes(self.metrics, status=200 if self.metrics else 404)
        name = call.body["method"] if path == "/collective_rpc" else path
        self.calls.append(name)
        if name in self.answers:
            return self.answers[name](call)
        if path == "/collective_rpc":
            return call.send({"results": [self._called(name, *call.body["args"])]})
        if path == "/inference/v1/generate":
            return call.send(self.completions(call))
        if path == "/update_weight_version":
            assert self.is_paused
            self.version = call.body["new_version"]
        if path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
        call.send({"success": True})

    def completions(self, call: Call, **fields: Any) -> dict[str, Any]:
        """Return an answer in which the likeliest token is the end."""
        tokens = [{"token_id": 5, "logprob": -0.5, "rank": 1056964608, "top_logprobs": []}]
        tokens += [{"token_id": END_ID, "logprob": -0.25, "rank": 1065353216, "top_logprobs": []}]
        tokens = tokens[: call.body["sampling_params"]["max_tokens"]]
        choice = {
            "token_ids": [token["token_id"] for token in tokens],
            "logprobs": {"content": tokens},
            "finish_reason": "stop",
            "stop_reason": END_ID,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
        }
        count = call.body["sampling_params"]["n"]
        return {"choices": [choice | fields | {"index": index} for index in reversed(range(count))]}

    def _called(self, method: str, *arguments: str) -> Any:
        if method == "describe_server":
            return {
                "model": str(self.model_dir),
                "dtype": "float32",
                "context_tokens": 256,
                "batch": 4,
                "workers": 1,
                "pipeline_parallel": 1,
                "data_parallel": 1,
                "async_scheduling": False,
                "v2_model_runner": False,
                "speculative_decoding": False,
            } | self.settings
        if method == "offer_memory":
            try:
                self.rooms = open_frame_memory(arguments[0], workers=1)
            except OSError as error:
                return f"cannot be used: {error}"
            return None
        if method == "begin_session":
            self.session, _ = arguments
            self.words = self.base.copy()
            rules = TextRules.of(self.tokenizer_dir or self.model_dir)
            return {
                "layout": self.layout.digest.hex(),
                "text": rules.digest.hex(),
                "text_summary": rules.summary,
                "elements": {span.name: span.elements for span in self.layout.tensors},
            }
        if arguments[0] != self.session:
            return "the server was started again"
        if method == "move_frames":
            assert self.is_paused or "write" not in arguments[1]
            move_frames(arguments[1], ArrayWords(self.words), self.layout, self.rooms, worker=0)
        return dict(self.drawn) if method == "count_tokens" else None


def stub_of(model_dir: Path) -> VllmStub:
    """Return a server of the model that does not listen yet."""
    stub = VllmStub(model_dir, *_loaded(model_dir))
    stub.restart()
    return stub


@functools.lru_cache(maxsize=2)
def _loaded(model_dir: Path) -> tuple[Layout, Words]:
    engine = TorchEngine(model_dir, device="cpu", compute_dtype=torch.float32, threads=1, seed=0)
    return engine.layout, words_of(engine.weights.live, layout=engine.layout)


@contextmanager
def listening(stub: VllmStub) -> Iterator[VllmStub]:
    """Let a server listen on a free port."""

    def answer(handler: BaseHTTPRequestHandler, sent: bytes) -> None:
        stub.keys.add(handler.headers.get("Authorization"))
        stub.answer(Call(stub, handler, handler.path, json.loads(sent or b"null")))

    with served("GET POST", answer, version="HTTP/1.1") as stub.address:
        yield stub
