"""What a process writes off a terminal is one JSON object a line, whoever writes it, also when it dies."""

import signal
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from node.identity.identity_store import Identity
from node.identity.peer import hub_name
from support.coordinator_process import coordinator
from support.identity import MadeRun, make_run
from support.rpc import invoke

STATUS = "/heterorl.v1.MembershipService/GetStatus"


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path, now=time.time())


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
