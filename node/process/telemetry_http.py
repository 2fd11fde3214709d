"""The HTTP endpoints of a process, for Prometheus and for a supervisor.

    /metrics   the registry, in the Prometheus text format
    /healthz   200 while the event loop turns; 503 once it has not for LOOP_STALL_S
    /readyz    200 while the daemon serves; 503 before, on standby and while it drains; what of itself fails
    /          the page of the run, HTML, where a role of the process has something to show

A thread with an event loop of its own answers, so that a stalled event loop looks different from a dead
process. It renders metrics and pages in threads, two at a time, and answers the rest at once: a supervisor
never waits behind scrapers. A client has a few seconds for its whole request. When all places are taken, the
oldest client goes.

A web page of a stranger may send a browser here under a name of its own (DNS rebinding), and would read the
answer. So a request that comes by loopback has to name an address, localhost, or the host that is configured.
A proxy on this machine names one of these, as nginx does unless told otherwise.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from node.errors import CountRefusal, Reason, StartupError
from node.process.daemon import Phase
from node.rpc.address import is_loopback, listening_socket, split_address
from node.rpc.strangers.places import PlaceLimits, Places, origin
from node.system.clock import Clock
from node.system.waits import wait_at_most
from node.telemetry.metrics import exposition
from node.telemetry.own_faults import OwnFaults

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
LOOP_STALL_S: Final = 15.0
"""No work of ours blocks the event loop this long: tensors and compression have threads of their own."""

PLACES: Final = PlaceLimits(connections=64, per_address=32)
REQUEST_S: Final = 3.0
"""For a whole request to arrive."""

ANSWER_S: Final = 30.0
"""For an answer to be rendered and read: 4 MB at 1 Mbit/s."""

_REQUEST_BYTES: Final = 8192
_AT_ONCE: Final = ("/healthz", "/readyz")
"""Paths that are answered without a thread."""

_OTHER_HOST: Final = (
    b"this is not served under that host by loopback: use 127.0.0.1 or localhost, or let the proxy name one "
    b"of these\n"
)

_PATHS: Final = b"/metrics /healthz /readyz, and / where a role shows the run\n"

_MAPPED: Final = "::ffff:"
"""Before an IPv4 address at a socket that listens for both."""

_TEXT: Final = "text/plain; charset=utf-8"
_HTML: Final = "text/html; charset=utf-8"


class TelemetryServer:
    """A service, started first and stopped last, so that start and drain can be watched."""

    name = "telemetry"

    def __init__(
        self,
        *,
        listen: str,
        may_move: bool = False,
        registry: CollectorRegistry,
        page: Callable[[], bytes | None],
        clock: Clock,
        count_refusal: CountRefusal,
        faults: OwnFaults,
    ) -> None:
        """Prepare.

        Args:
            may_move: take any free port of the address where its own is taken.
            page: returns the page ``/``; None: there is none. Called in any thread.
        """
        self._listen = listen
        self._may_move = may_move
        self._registry = registry
        self._page = page
        self._clock = clock
        self._count_refusal = count_refusal
        self._faults = faults
        self._phase = Phase.STARTING
        self._heartbeat_at = clock.monotonic()
        self._places = Places["asyncio.Task[None]"](PLACES)
        self._renderers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="telemetry")
        self.address: tuple[str, int] | None = None
        """Host and port; None until it is bound."""

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
                fault = self._faults.first()
                said = "" if fault is None else f"; {fault.what}, for {fault.for_s:.0f} s"
                return status, _TEXT, f"{self._phase}{said}\n".encode()
            case "/" if (page := self._page()) is not None:
                return HTTPStatus.OK, _HTML, page
            case _:
                return HTTPStatus.NOT_FOUND, _TEXT, _PATHS

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Serve until ``stopping``. Raises StartupError: the address cannot be bound."""
        listener = self._bind()
        self.address = listener.getsockname()[:2]
        loop, is_over = asyncio.new_event_loop(), asyncio.Event()
        answering = threading.Thread(
            target=self._answer_all, args=(loop, listener, is_over), name="telemetry", daemon=True
        )
        answering.start()
        try:
            logger.info("telemetry listens", extra={"host": self.address[0], "port": self.address[1]})
            ready()
            while not stopping.is_set():
                self._heartbeat_at = self._clock.monotonic()
                await wait_at_most(stopping, HEARTBEAT_S)
        finally:
            loop.call_soon_threadsafe(is_over.set)
            answering.join()

    def _bind(self) -> socket.socket:
        try:
            return listening_socket(self._listen)
        except OSError as error:
            if self._may_move and error.errno == errno.EADDRINUSE:
                return listening_socket(f"{self._listen.rpartition(':')[0]}:0")
            raise StartupError(
                f"telemetry cannot listen on {self._listen}: {error.strerror or error}",
                fix="Set telemetry.http_listen to a free address; port 0 takes any free port.",
            ) from error

    def _answer_all(
        self, loop: asyncio.AbstractEventLoop, listener: socket.socket, is_over: asyncio.Event
    ) -> None:
        async def until_it_is_over() -> None:
            server = await asyncio.start_server(self._serve, sock=listener, limit=_REQUEST_BYTES)
            await is_over.wait()
            server.close()
            self._renderers.shutdown(wait=False, cancel_futures=True)

        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(until_it_is_over())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        address = origin((writer.get_extra_info("peername") or ("",))[0])
        displaced = self._places.enter(task, address, now=asyncio.get_running_loop().time())
        if displaced is not None:
            displaced.cancel()
            self._count_refusal(service="telemetry", reason=Reason.BUSY)
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
            async with asyncio.timeout(ANSWER_S):
                at = (writer.get_extra_info("sockname") or ("",))[0]
                writer.write(await self._response_or_fault(head, at=at))
                writer.close()
                await writer.wait_closed()
        except TimeoutError:
            self._count_refusal(service="telemetry", reason=Reason.BUSY)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # gone, or not a request
        finally:
            self._places.leave(task)
            writer.transport.abort()

    async def _response_or_fault(self, head: bytes, *, at: str) -> bytes:
        try:
            return await self._response(head, at=at)
        except Exception:  # of any kind, also an OSError: the client is not gone, the page has failed
            logger.warning("telemetry request failed", exc_info=True)
            return _answered(HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, b"see the log of this process\n")

    async def _response(self, head: bytes, *, at: str) -> bytes:
        """Return the answer to a request that came in at an address of this machine."""
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0]
        host = _host(head)
        if not self._is_own(host, at=at):
            self._count_refusal(service="telemetry", reason=Reason.MALFORMED)
            status, content_type, body = HTTPStatus.MISDIRECTED_REQUEST, _TEXT, _OTHER_HOST
        elif method != "GET":
            status, content_type, body = HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"GET\n"
        elif path.partition("?")[0] in _AT_ONCE:
            status, content_type, body = self.answer(path)
        else:
            loop = asyncio.get_running_loop()
            status, content_type, body = await loop.run_in_executor(self._renderers, self.answer, path)
        return _answered(status, content_type, body)

    def _is_own(self, host: str | None, *, at: str) -> bool:
        """Whether a request is meant for this server; browsers always name a host."""
        if host is None or not is_loopback(at.removeprefix(_MAPPED)):
            return True
        return _is_local_name(host) or host.lower() == split_address(self._listen)[0].lower()


def _host(head: bytes) -> str | None:
    """Return the host that a request names, without its port; None: none."""
    names = [
        value.strip()
        for name, _, value in (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
        if name.strip().lower() == "host"
    ]
    if not names:
        return None
    if len(names) > 1:
        return ""
    if names[0].startswith("["):
        return names[0][1:].partition("]")[0]
    return names[0].rpartition(":")[0] if ":" in names[0] else names[0]


def _is_local_name(host: str) -> bool:
    """Whether a host is an address or this machine's name for itself: no name server was asked for these."""
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _answered(status: HTTPStatus, content_type: str, body: bytes) -> bytes:
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"X-Content-Type-Options: nosniff\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body
