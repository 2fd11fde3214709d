import asyncio
import http.client
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from node.errors import StartupError
from node.process.daemon import Phase
from node.process.telemetry_http import LOOP_STALL_S, REQUESTS_AT_ONCE, TelemetryServer
from support.clock import ManualClock


@asynccontextmanager
async def serving(server: TelemetryServer) -> AsyncIterator[None]:
    is_ready, stopping = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run(ready=is_ready.set, stopping=stopping))
        await is_ready.wait()
        try:
            yield
        finally:
            stopping.set()


def make_server(
    registry: CollectorRegistry | None = None,
    *,
    listen: str = "127.0.0.1:0",
    clock: ManualClock | None = None,
    pages: dict[str, Callable[[], bytes]] | None = None,
) -> TelemetryServer:
    return TelemetryServer(
        listen=listen,
        registry=registry or CollectorRegistry(),
        pages={} if pages is None else pages,
        clock=clock or ManualClock(),
    )


def get(server: TelemetryServer, path: str) -> tuple[int, str]:
    assert server.address is not None
    connection = http.client.HTTPConnection(*server.address, timeout=5)
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


async def test_any_other_path_is_answered_with_the_ones_there_are() -> None:
    server = make_server()
    async with serving(server):
        assert await asyncio.to_thread(get, server, "/../etc/passwd") == (404, "/metrics /healthz /readyz\n")


async def test_a_role_may_add_a_page_while_the_server_runs() -> None:
    pages: dict[str, Callable[[], bytes]] = {}
    server = make_server(pages=pages)
    async with serving(server):
        assert (await asyncio.to_thread(get, server, "/samples"))[0] == 404
        pages["/samples"] = lambda: b"<p>seven</p>"
        assert await asyncio.to_thread(get, server, "/samples?x=1") == (200, "<p>seven</p>")
        assert await asyncio.to_thread(get, server, "/") == (404, "/metrics /healthz /readyz /samples\n")


async def test_a_taken_port_is_a_startup_error_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = make_server(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StartupError, match="cannot listen") as caught:
            await server.run(ready=lambda: None, stopping=asyncio.Event())
    assert "telemetry.http_listen" in caught.value.fix


async def test_the_port_is_free_again_after_the_server_has_stopped() -> None:
    server = make_server()
    async with serving(server):
        assert server.address is not None
        host, port = server.address
    async with serving(make_server(listen=f"{host}:{port}")):
        pass


async def test_clients_that_say_nothing_cannot_pile_up() -> None:
    server = make_server()
    async with serving(server):
        assert server.address is not None
        silent = [socket.create_connection(server.address) for _ in range(REQUESTS_AT_ONCE)]
        one_more = socket.create_connection(server.address, timeout=5)
        try:
            assert await asyncio.to_thread(one_more.recv, 1) == b""
        finally:
            for connection in (*silent, one_more):
                connection.close()


async def test_a_metric_that_cannot_be_read_is_logged_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = CollectorRegistry()
    Gauge("heterorl_x_versions", "Versions.", registry=registry).set_function(lambda: 1 / 0)
    server = make_server(registry)
    async with serving(server):
        with pytest.raises(http.client.RemoteDisconnected):
            await asyncio.to_thread(get, server, "/metrics")
        assert (await asyncio.to_thread(get, server, "/healthz"))[0] == 200
    assert "telemetry request failed" in caplog.messages
