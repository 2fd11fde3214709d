"""A coordinator as a process with few open files, while strangers hold all the connections they can."""

import asyncio
import contextlib
import http.client
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio
import psutil
import pytest

from node.errors import RefusedError
from node.identity.identity_store import Identity
from node.rpc.address import join_address
from node.rpc.call_ends import ConnectionLost, classified
from node.rpc.channel import Purpose, dial, dial_as_stranger
from node.system import descriptors
from support import strangers
from support.coordinator_process import Coordinator, coordinator
from support.identity import MadeRun, make_run
from support.rpc import invoke
from support.waiting import eventually, until

STATUS = "/heterorl.v1.MembershipService/GetStatus"
ENROL = "/heterorl.v1.EnrolmentService/Enrol"
OPEN_FILES = 256


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path, now=time.time())


@dataclass(frozen=True, slots=True)
class Hub:
    """A coordinator's process and where it listens."""

    coordinator: Coordinator
    process: psutil.Process
    members: str
    enrolment: str
    telemetry: str


@asynccontextmanager
async def a_hub(made: MadeRun, log: Path) -> AsyncIterator[Hub]:
    async with coordinator(made, log, open_files=OPEN_FILES) as started:
        await started.event("ready")
        addresses = {event["service"]: event["address"] for event in started.events if "service" in event}
        listens = await started.event("telemetry listens")
        yield Hub(
            started,
            psutil.Process(started.process.pid),
            addresses["members"],
            addresses["enrolment"],
            join_address(listens["host"], listens["port"]),
        )


async def call_status(hub: Hub, caller: Identity) -> None:
    """Call over a new connection."""
    async with dial(hub.members, caller, purpose=Purpose.CONTROL, now=time.time()) as channel:
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(ConnectionLost), classified():
                    await invoke(channel, STATUS, timeout_s=5)
                    return
                await asyncio.sleep(0.1)


def health(hub: Hub) -> int:
    connection = http.client.HTTPConnection(hub.telemetry, timeout=5)
    connection.request("GET", "/healthz")
    status = connection.getresponse().status
    connection.close()
    return status


async def is_heard(channel: grpc.aio.Channel) -> bool:
    """Whether a stranger comes as far as the servicer, which refuses its token."""
    with pytest.raises((RefusedError, ConnectionLost)) as answer, classified():
        await invoke(channel, ENROL)
    return isinstance(answer.value, RefusedError)


async def check_alive(hub: Hub, made: MadeRun) -> None:
    """Members are served over old and new connections, and health is answered."""
    for _ in range(5):
        await call_status(hub, made.sampler)
        assert await asyncio.to_thread(health, hub) == 200


async def test_strangers_with_all_connections_they_can_hold_stop_neither_members_nor_newcomers(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "CONNECT_TIMEOUT_S", 1.5)  # waited out by those that are not let in
    most_taken = OPEN_FILES - descriptors.reserve(OPEN_FILES)
    async with (
        a_hub(made, tmp_path / "log") as hub,
        dial(hub.members, made.learner, purpose=Purpose.CONTROL, now=time.time()) as early,
    ):
        assert (await hub.coordinator.event("open files"))["limit"] == OPEN_FILES
        told = (await hub.coordinator.event("few open files"))["detail"]
        assert f"may have {OPEN_FILES} files open, which is room for 40 peers" in told
        assert "LimitNOFILE" in told
        await invoke(early, STATUS)
        async with strangers.hold_idle_connections(hub.enrolment, 400) as held:
            assert held.open <= 16
            await check_alive(hub, made)
            async with dial_as_stranger(
                hub.enrolment, run_id=made.run_id, ca_pem=made.coordinator.ca_pem
            ) as channel:
                await eventually(partial(is_heard, channel))
        assert hub.process.num_fds() < most_taken
        for _ in range(3):
            async with strangers.hold_idle_connections(hub.members, 400, tls=False):
                await until(lambda: hub.process.num_fds() <= most_taken + 8)
                await check_alive(hub, made)
                await invoke(early, STATUS)
        closed = await hub.coordinator.event("connections closed to keep descriptors free")
        assert closed["strangers"] > 0
        assert closed["members"] == 0
