"""What a process writes off a terminal is one JSON object a line, whoever writes it, also when it dies."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from node.identity.identity_store import Identity
from node.identity.peer import hub_name
from support.identity import MadeRun, make_run
from support.rpc import invoke

SETTINGS = {
    "coordinator.listen": "127.0.0.1:0",
    "coordinator.enrolment_listen": "127.0.0.1:0",
    "coordinator.task": "addition",
    "coordinator.prompts": "100",
    "coordinator.group_size": "2",
    "coordinator.batch_groups": "2",
    "coordinator.max_staleness_versions": "2",
    "coordinator.max_new_tokens": "4",
}
STATUS = "/heterorl.v1.MembershipService/GetStatus"


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path, now=time.time())


class Coordinator:
    """``heterorl-node --role coordinator`` with both its streams in one file, as journald has them."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    async def event(self, wanted: str) -> dict[str, Any]:
        """Return the first event of a name, once it is there."""
        async with asyncio.timeout(15):
            while True:
                for line in self.lines:
                    with contextlib.suppress(ValueError):
                        event: dict[str, Any] = json.loads(line)
                        if event["event"] == wanted:
                            return event
                await asyncio.sleep(0.02)  # a file tells nobody that it grew

    def plain_text(self) -> list[str]:
        """Return the lines that are no JSON objects."""
        return [line for line in self.lines if not _is_event(line)]


def _is_event(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


@asynccontextmanager
async def coordinator(made: MadeRun, log: Path) -> AsyncIterator[Coordinator]:
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    command = ("-m", "node", "--role", "coordinator", "--state-dir", str(made.directory), *settings)
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=file, stderr=file, env=os.environ
        )
    try:
        yield Coordinator(process, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def knock(made: MadeRun, address: str, caller: Identity) -> None:
    """Call with a certificate the hub does not accept."""
    credentials = grpc.ssl_channel_credentials(
        made.run.ca_certificate_pem, caller.key_pem, caller.certificate_pem
    )
    options = [("grpc.ssl_target_name_override", hub_name(made.run_id))]
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await invoke(channel, STATUS)


async def test_a_handshake_that_fails_is_an_event_with_its_reason(made: MadeRun, tmp_path: Path) -> None:
    async with coordinator(made, tmp_path / "log") as hub:
        address = (await hub.event("serving"))["address"]
        await knock(made, address, made.foreign)
        told = await hub.event("native message")
        assert "SSL_ERROR_SSL" in told["text"]
        assert "certificate signature failure" in told["text"]
        assert (told["level"], told["role"]) == ("info", "coordinator")
        assert told["source"].startswith("ssl_transport_security")
        hub.process.send_signal(signal.SIGTERM)
        assert await hub.process.wait() == 0
        await hub.event("stopped")
        assert hub.plain_text() == []


async def test_a_process_that_crashes_in_native_code_says_where_as_events(
    made: MadeRun, tmp_path: Path
) -> None:
    async with coordinator(made, tmp_path / "log") as hub:
        await hub.event("ready")
        hub.process.send_signal(signal.SIGSEGV)
        assert await hub.process.wait() == -signal.SIGSEGV
        told = await hub.event("standard error")
        assert "Fatal Python error: Segmentation fault" in told["text"]
        assert "bootstrap.py" in told["text"]
        assert hub.plain_text() == []
