"""The HTTP endpoints of a process, for Prometheus and for a supervisor.

    /metrics   the registry, in the Prometheus text format
    /healthz   200 while the event loop turns; 503 once it has not for LOOP_STALL_S
    /readyz    200 while the daemon serves; 503 before, and while it drains
    ...        pages of the roles, HTML

Threads answer, so that a stalled event loop looks different from a dead process.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from node.clock import Clock
from node.errors import StartupError
from node.process.daemon import Phase
from node.rpc.address import split_address
from node.telemetry.metrics import exposition
from node.waits import wait_at_most

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
LOOP_STALL_S: Final = 15.0
"""No work of ours blocks the event loop this long: tensors and compression have threads of their own."""

REQUESTS_AT_ONCE: Final = 8
"""Any more are closed at once: the endpoints serve a scraper and a supervisor, not the public."""

_TEXT: Final = "text/plain; charset=utf-8"
_HTML: Final = "text/html; charset=utf-8"


class TelemetryServer:
    """A service, started first and stopped last, so that start and drain can be watched."""

    name = "telemetry"

    def __init__(
        self,
        *,
        listen: str,
        registry: CollectorRegistry,
        pages: Mapping[str, Callable[[], bytes]],
        clock: Clock,
    ) -> None:
        """Prepare; ``pages`` by path, which roles may add to later."""
        self._listen = listen
        self._registry = registry
        self._pages = pages
        self._clock = clock
        self._phase = Phase.STARTING
        self._heartbeat_at = clock.monotonic()
        self._address: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port; None until it is bound."""
        return self._address

    def announce(self, phase: Phase) -> None:
        """Set the daemon's phase, for /readyz."""
        self._phase = phase

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Return status, content type and body for a path. Any thread."""
        match path.partition("?")[0]:
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_LATEST, exposition(self._registry)
            case "/healthz":
                silent_s = self._clock.monotonic() - self._heartbeat_at
                status = HTTPStatus.OK if silent_s < LOOP_STALL_S else HTTPStatus.SERVICE_UNAVAILABLE
                return status, _TEXT, f"the event loop turned {silent_s:.1f} s ago\n".encode()
            case "/readyz":
                is_ready = self._phase is Phase.SERVING
                status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
                return status, _TEXT, f"{self._phase}\n".encode()
            case page if page in self._pages:
                return HTTPStatus.OK, _HTML, self._pages[page]()
            case _:
                there = " ".join(("/metrics", "/healthz", "/readyz", *self._pages))
                return HTTPStatus.NOT_FOUND, _TEXT, f"{there}\n".encode()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Serve until ``stopping``.

        Raises:
            StartupError: the address cannot be bound.
        """
        server = self._bind()
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="telemetry", daemon=True)
        thread.start()
        try:
            self._address = server.server_name, server.server_port
            logger.info("telemetry listens", extra={"host": server.server_name, "port": server.server_port})
            ready()
            while not stopping.is_set():
                self._heartbeat_at = self._clock.monotonic()
                await wait_at_most(stopping, HEARTBEAT_S)
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _bind(self) -> "_Server":
        host, port = split_address(self._listen)
        try:
            return _Server((host, port), self)
        except OSError as error:
            raise StartupError(
                f"telemetry cannot listen on {self._listen}: {error.strerror or error}",
                fix="Set telemetry.http_listen to a free address; port 0 takes any free port.",
            ) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a client that never reads must not keep the process from ending

    def __init__(self, address: tuple[str, int], telemetry: TelemetryServer) -> None:
        self.telemetry = telemetry
        self._places = threading.BoundedSemaphore(REQUESTS_AT_ONCE)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's looks up its own name, which can take seconds without DNS
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.warning("telemetry request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds without a byte
    server: _Server

    def do_GET(self) -> None:
        status, content_type, body = self.server.telemetry.answer(self.path)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape every few seconds is no event."""
