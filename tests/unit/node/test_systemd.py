import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from node.process.daemon import Phase
from node.process.systemd import Systemd, status_line
from node.values.roles import Role


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(5)
        yield line


def test_systemd_is_told_ready_and_stopping(systemd: socket.socket) -> None:
    node = Systemd.from_environment({"NOTIFY_SOCKET": systemd.getsockname()})
    node.announce(Phase.SERVING)
    node.announce(Phase.DRAINING)
    assert [systemd.recv(64), systemd.recv(64)] == [b"READY=1\nSTATUS=serving", b"STOPPING=1"]


def test_an_abstract_socket_is_written_with_an_at_sign() -> None:
    name = f"heterorl-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(f"\0{name}")
        line.settimeout(5)
        Systemd.from_environment({"NOTIFY_SOCKET": f"@{name}"}).announce(Phase.SERVING)
        assert line.recv(64) == b"READY=1\nSTATUS=serving"


async def test_the_watchdog_is_kept_quiet_from_the_event_loop_until_the_daemon_stops(
    systemd: socket.socket,
) -> None:
    environ = {
        "NOTIFY_SOCKET": systemd.getsockname(),
        "WATCHDOG_USEC": "20000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Systemd.from_environment(environ).run(ready=lambda: None, stopping=stopping))
        assert await asyncio.to_thread(systemd.recv, 64) == b"WATCHDOG=1"
        assert await asyncio.to_thread(systemd.recv, 64) == b"WATCHDOG=1"
        stopping.set()


@pytest.mark.parametrize(
    "watchdog", [{}, {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "0"}]
)
async def test_a_watchdog_that_is_not_ours_is_left_alone(
    systemd: socket.socket, watchdog: dict[str, str]
) -> None:
    environ = {"NOTIFY_SOCKET": systemd.getsockname(), **watchdog}
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Systemd.from_environment(environ).run(ready=lambda: None, stopping=stopping))
        systemd.settimeout(0.1)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(systemd.recv, 64)
        stopping.set()


async def test_systemctl_shows_what_the_process_does_whenever_that_changes(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.process.systemd.STATUS_EVERY_S", 0.01)
    registry, stopping = CollectorRegistry(), asyncio.Event()
    version = Gauge("heterorl_learner_version", "", registry=registry)
    waits_for = ""

    def status() -> str:
        return status_line(registry, [Role.LEARNER, Role.VERIFIER], waits_for=waits_for)

    environ = {"NOTIFY_SOCKET": systemd.getsockname()}
    async with asyncio.TaskGroup() as tasks:
        node = Systemd.from_environment(environ, status)
        tasks.create_task(node.run(ready=lambda: None, stopping=stopping))
        assert (
            await asyncio.to_thread(systemd.recv, 200) == b"STATUS=starting; learner at version 0, verifier"
        )
        node.announce(Phase.SERVING)
        assert await asyncio.to_thread(systemd.recv, 200) == b"READY=1\nSTATUS=serving"
        assert await asyncio.to_thread(systemd.recv, 200) == b"STATUS=learner at version 0, verifier"
        version.set(41)
        waits_for = "rollout groups"
        assert await asyncio.to_thread(systemd.recv, 200) == (
            b"STATUS=learner at version 41, verifier; waits for rollout groups"
        )
        stopping.set()


def test_without_systemd_nothing_is_said_and_a_dead_one_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Systemd.from_environment({}).announce(Phase.SERVING)
    assert caplog.messages == []
    Systemd.from_environment({"NOTIFY_SOCKET": str(tmp_path / "gone")}).announce(Phase.SERVING)
    assert caplog.messages == ["systemd cannot be notified"]
