import asyncio
import contextlib
import http.client
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from node.errors import Reason
from node.page.live_page import LivePage
from node.page.section import Section
from node.process.daemon import Phase
from node.process.telemetry_http import LOOP_STALL_S, PLACES, REQUEST_S, TelemetryServer
from node.rpc.address import join_address
from node.telemetry.own_faults import OwnFaults
from support.clock import ManualClock
from support.present import present
from support.refusals import cannot_start
from support.strangers import slow_http_clients
from support.waiting import WITHIN_S, until


@asynccontextmanager
async def serving(server: TelemetryServer) -> AsyncIterator[tuple[str, int]]:
    is_ready, stopping = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run(ready=is_ready.set, stopping=stopping))
        await is_ready.wait()
        try:
            yield present(server.address)
        finally:
            stopping.set()


def make_server(
    registry: CollectorRegistry | None = None,
    *,
    listen: str = "127.0.0.1:0",
    may_move: bool = False,
    clock: ManualClock | None = None,
    page: Callable[[], bytes | None] = lambda: None,
    refusals: list[Reason] | None = None,
    faults: OwnFaults | None = None,
) -> TelemetryServer:
    def count_refusal(*, service: str, reason: Reason) -> None:
        if refusals is not None:
            refusals.append(reason)

    return TelemetryServer(
        listen=listen,
        may_move=may_move,
        registry=registry or CollectorRegistry(),
        page=page,
        clock=clock or ManualClock(),
        count_refusal=count_refusal,
        faults=faults or OwnFaults(ManualClock().monotonic),
    )


def get(server: TelemetryServer, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*present(server.address), timeout=WITHIN_S / 2)
    connection.request("GET", path)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


async def test_metrics_are_served_as_prometheus_reads_them() -> None:
    registry = CollectorRegistry()
    Gauge("heterorl_x_versions", "Versions.", registry=registry).set(7)
    server = make_server(registry)
    async with serving(server):
        status, text = await asyncio.to_thread(get, server, "/metrics?x=1")
    assert status == 200
    (family,) = text_string_to_metric_families(text)
    assert (family.name, family.samples[0].value) == ("heterorl_x_versions", 7)


async def test_ready_means_serving_and_neither_starting_nor_draining() -> None:
    server = make_server()
    async with serving(server):
        answers = [await asyncio.to_thread(get, server, "/readyz")]
        for phase in (Phase.SERVING, Phase.DRAINING):
            server.announce(phase)
            answers.append(await asyncio.to_thread(get, server, "/readyz"))
    assert answers == [(503, "starting\n"), (200, "serving\n"), (503, "draining\n")]


async def test_health_is_the_age_of_the_event_loops_last_turn() -> None:
    clock = ManualClock()
    server = make_server(clock=clock)
    async with serving(server):
        assert (await asyncio.to_thread(get, server, "/healthz"))[0] == 200
        clock.advance(LOOP_STALL_S)
        status, text = get(server, "/healthz")  # on the loop: it cannot heartbeat meanwhile
    assert (status, text) == (503, f"the event loop turned {LOOP_STALL_S:.1f} s ago\n")


async def test_the_page_is_there_once_a_role_shows_something_and_other_paths_name_what_is_there() -> None:
    page = LivePage(ManualClock())
    server = make_server(page=page.render)
    async with serving(server):
        nowhere = await asyncio.to_thread(get, server, "/../etc/passwd")
        assert nowhere == (404, "/metrics /healthz /readyz, and / where a role shows the run\n")
        assert await asyncio.to_thread(get, server, "/") == nowhere
        page.add("first", lambda: [Section("Steps", ("seven",))])
        status, shown = await asyncio.to_thread(get, server, "/?x=1")
        assert (status, "<p>seven</p>" in shown) == (200, True)
        assert await asyncio.to_thread(get, server, "/samples") == nowhere


async def test_a_taken_port_is_a_startup_error_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = make_server(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with cannot_start("127.0.0.1") as caught:
            await server.run(ready=lambda: None, stopping=asyncio.Event())
    assert "telemetry.http_listen" in caught.value.fix


async def test_where_the_usual_port_is_taken_a_second_process_of_the_machine_takes_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = make_server(listen=f"127.0.0.1:{port}", may_move=True)
        async with serving(server) as (host, moved):
            assert (host, moved != port) == ("127.0.0.1", True)
            assert (await asyncio.to_thread(get, server, "/healthz"))[0] == 200
    server = make_server(listen=f"127.0.0.1:{port}", may_move=True)
    async with serving(server) as address:
        assert address == ("127.0.0.1", port)


async def test_clients_that_say_nothing_cannot_pile_up_the_oldest_goes() -> None:
    refusals: list[Reason] = []
    server = make_server(refusals=refusals)
    async with serving(server) as address:
        silent = [socket.create_connection(address, timeout=5) for _ in range(PLACES.per_address + 1)]
        try:
            assert await asyncio.to_thread(silent[0].recv, 1) == b""
        finally:
            for connection in silent:
                connection.close()
    assert refusals == [Reason.BUSY]


async def test_health_is_answered_among_64_clients_whose_requests_never_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.process.telemetry_http.REQUEST_S", 10 * WITHIN_S)  # no end by time, either
    server = make_server()
    async with serving(server) as address, slow_http_clients(join_address(*address), 64, byte_every_s=0.5):
        for path in ("/healthz", "/readyz", "/metrics") * 8:
            status = 0
            while not status:
                # From the clients' own address: where they all come again at once it may be displaced.
                with contextlib.suppress(http.client.RemoteDisconnected):
                    status, _ = await asyncio.to_thread(get, server, path)
            assert status in (200, 503)


async def test_a_request_has_a_time_limit_as_a_whole_and_not_for_each_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.process.telemetry_http.REQUEST_S", 0.3)
    assert REQUEST_S <= 5
    server = make_server()
    async with serving(server) as address:
        reader, writer = await asyncio.open_connection(*address)
        reading = asyncio.create_task(reader.read())
        sent = 0
        async with asyncio.timeout(5):
            while not reading.done():
                writer.write(b"G")
                sent += 1
                await asyncio.sleep(0.05)
        assert sent <= 20
        writer.close()


async def test_health_is_answered_while_scrapes_take_for_ever() -> None:
    registry, release = CollectorRegistry(), threading.Event()

    def wait() -> float:
        release.wait(10)
        return 1.0

    Gauge("heterorl_x_versions", "Versions.", registry=registry).set_function(wait)
    server = make_server(registry)
    async with serving(server):
        scrapes = [asyncio.create_task(asyncio.to_thread(get, server, "/metrics")) for _ in range(4)]
        await asyncio.sleep(0.1)
        assert (await asyncio.to_thread(get, server, "/healthz"))[0] == 200
        release.set()
        assert [status for status, _ in await asyncio.gather(*scrapes)] == [200] * 4


async def test_a_client_that_does_not_read_its_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.process.telemetry_http.ANSWER_S", 0.2)
    refusals: list[Reason] = []
    server = make_server(page=lambda: bytes(64 << 20), refusals=refusals)
    async with serving(server) as address:
        with socket.create_connection(address, timeout=5) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: refusals == [Reason.BUSY])


async def test_readiness_says_first_what_of_the_process_itself_fails() -> None:
    clock = ManualClock()
    faults = OwnFaults(clock.monotonic)
    faults.failed("ledger", "the ledger could not be written: disk full", fix="Free space.")
    server = make_server(faults=faults)
    async with serving(server):
        server.announce(Phase.SERVING)
        said = await asyncio.to_thread(get, server, "/readyz")
    assert said == (200, "serving; the ledger could not be written: disk full, for 0 s\n")


STRANGERS = (
    "evil.example",
    "evil.example:9464",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "127.0.0.1:80\r\nHost: evil.example",
    "evil.example\r\nHost: 127.0.0.1",
    "",
    "@127.0.0.1",
    "::1",  # not how a browser writes it
)
OWN = ("127.0.0.1:80", "[::1]:80", "192.0.2.7", "localhost", "LocalHost.:9464", "run.localhost:9464", None)


async def status_of(port: int, path: str, host: str | None) -> tuple[int, bool]:
    """Return the status of the answer to a request that names a host, and whether it shows the page."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    named = "" if host is None else f"Host: {host}\r\n"
    writer.write(f"GET {path} HTTP/1.1\r\n{named}Accept: */*\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1]), b"secret" in answer


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "0.0.0.0:0"])
async def test_a_request_by_loopback_under_a_strangers_name_is_refused(listen: str) -> None:
    """As of a web page whose name leads to this machine since it was loaded: it could read the answer."""
    refusals: list[Reason] = []
    server = make_server(listen=listen, page=lambda: b"secret", refusals=refusals)
    async with serving(server) as (_, port):
        assert [await status_of(port, "/", host) for host in STRANGERS] == [(421, False)] * len(STRANGERS)
        for path in ("/metrics", "/healthz"):
            assert await status_of(port, path, STRANGERS[0]) == (421, False)
        assert refusals == [Reason.MALFORMED] * (len(STRANGERS) + 2)
        refusals.clear()
        assert [await status_of(port, "/", host) for host in OWN] == [(200, True)] * len(OWN)
    assert refusals == []


@pytest.mark.parametrize("request_line", [b"POST /healthz HTTP/1.1", b"nonsense"])
async def test_only_get_is_understood(request_line: bytes) -> None:
    server = make_server()
    async with serving(server) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request_line + b"\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
        writer.close()


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(24, "Too many open files")])
async def test_a_metric_that_cannot_be_read_is_logged_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail() -> float:
        raise error

    registry = CollectorRegistry()
    Gauge("heterorl_x_versions", "Versions.", registry=registry).set_function(fail)
    server = make_server(registry)
    async with serving(server):
        assert (await asyncio.to_thread(get, server, "/metrics"))[0] == 500
        assert (await asyncio.to_thread(get, server, "/healthz"))[0] == 200
    assert "telemetry request failed" in caplog.messages
