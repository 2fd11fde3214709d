"""A judge behind a real HTTP server, in threads of the test's process, that behaves as it is told."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.http_server import posted_to

PATIENCE_S = 20.0


@dataclass
class JudgeServer:
    """A request, and its answer."""

    url: str = ""
    answer: Callable[["Request"], None] = field(default=lambda request: request.say("Score: 7"))
    requests: list["Request"] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    most_at_once: int = 0
    at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_turns(self, *answers: Callable[["Request"], None]) -> None:
        """Answer requests in this way, one after the other, the last for ever."""
        waiting = list(answers)

        def answer(request: "Request") -> None:
            with self.lock:
                chosen = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            chosen(request)

        self.answer = answer


@dataclass
class Request:
    """A request in progress."""

    handler: BaseHTTPRequestHandler
    server: JudgeServer
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def asked(self) -> str:
        text: str = self.body["messages"][-1]["content"]
        return text

    def say(self, text: Any) -> None:
        self.send(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}))

    def send(self, status: int, body: str, *, length: int | None = None, **headers: str) -> None:
        payload = body.encode()
        self.handler.send_response(status)
        self.handler.send_header("Content-Length", str(len(payload) if length is None else length))
        for name, value in headers.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.end_headers()
        self.handler.wfile.write(payload)

    def hang(self) -> None:
        self.server.stopped.wait(PATIENCE_S)

    def drip(self) -> None:
        """Send a byte now and then, for ever: no single read takes long."""
        self.send(200, "{", length=1 << 16)
        while not self.server.stopped.wait(0.05):
            self.handler.wfile.write(b" ")


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    """Run a judge on a free port."""
    server = JudgeServer()

    def answer(handler: BaseHTTPRequestHandler, sent: bytes) -> None:
        if not sent:
            return  # the other side has given up
        request = Request(handler, server, handler.path, dict(handler.headers), json.loads(sent))
        with server.lock:
            server.requests.append(request)
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            server.answer(request)
        finally:
            with server.lock:
                server.at_once -= 1

    with posted_to(answer) as address:
        server.url = f"{address}/v1"
        try:
            yield server
        finally:
            server.stopped.set()
