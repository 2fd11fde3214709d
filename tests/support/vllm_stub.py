"""What a sampler needs of a vLLM server, behind real HTTP and with real shared memory, in the test's process.

Its words are the model's files; its completions are made up. Tests replace answers by their path, or by the
method of the workers.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from node.tokenizer import tokenizer_digest
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from sampler.engines.frame_memory import Rooms, open_frame_memory
from sampler.engines.torch_engine import TorchEngine
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
    calls: list[str] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    hung_up: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    drawn: dict[str, int] = field(default_factory=dict)
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
            return {
                "layout": self.layout.digest.hex(),
                "tokenizer": tokenizer_digest(self.model_dir).hex(),
                "elements": {span.name: span.elements for span in self.layout.tensors},
            }
        if arguments[0] != self.session:
            return "the server was started again"
        if method == "move_frames":
            self._move(arguments[1].split(","))
        return dict(self.drawn) if method == "count_tokens" else None

    def _move(self, moves: Sequence[str]) -> None:
        for move in moves:
            call, frame, slot = move.split(" ")
            span, room = self.layout.frames[int(frame)], self.rooms[int(slot), 0]
            if call == "write":
                assert self.is_paused
                self.words[span.slice] = room[: span.words]
            else:
                room[: span.words] = self.words[span.slice]


def stub_of(model_dir: Path) -> VllmStub:
    """Return a server of the model that does not listen yet."""

    engine = TorchEngine(model_dir, device="cpu", compute_dtype=torch.float32, threads=1, seed=0)
    stub = VllmStub(model_dir, engine.layout, words_of(engine.weights.live, layout=engine.layout))
    stub.restart()
    return stub


@contextmanager
def listening(stub: VllmStub, *, port: int = 0) -> Iterator[VllmStub]:
    """Let a server listen on a free port, or on the one it had."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            stub.keys.add(self.headers.get("Authorization"))
            with suppress(BrokenPipeError, ConnectionResetError):  # the other side has given up
                stub.answer(Call(stub, self, self.path, json.loads(sent or b"null")))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    http.daemon_threads = True
    stub.address = f"http://127.0.0.1:{http.server_port}"
    serving = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield stub
    finally:
        http.shutdown()
        http.server_close()
        serving.join()
