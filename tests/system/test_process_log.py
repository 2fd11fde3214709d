"""A daemon's log off a terminal is one JSON object a line; gRPC is silent, and a crash leaves a traceback."""

import signal
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from node.identity.identity_store import Identity
from node.identity.peer import server_name
from node.values.roles import Role
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
    options = [("grpc.ssl_target_name_override", server_name(made.run_id, Role.COORDINATOR))]
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await invoke(channel, STATUS)


async def test_a_failed_handshake_adds_no_line_of_grpcs_own(made: MadeRun, tmp_path: Path) -> None:
    async with coordinator(made, tmp_path / "log") as hub:
        address = (await hub.event("serving"))["address"]
        await knock(made, address, made.foreign)
        hub.process.send_signal(signal.SIGTERM)
        assert await hub.process.wait() == 0
        await hub.event("stopped")
        assert hub.plain_text() == []


async def test_a_crash_in_native_code_says_where_on_standard_error(made: MadeRun, tmp_path: Path) -> None:
    async with coordinator(made, tmp_path / "log", open_files=1024) as hub:
        await hub.event("ready")
        hub.process.send_signal(signal.SIGSEGV)
        assert await hub.process.wait() == -signal.SIGSEGV
        said = "\n".join(hub.plain_text())
        assert "Fatal Python error: Segmentation fault" in said
        assert "bootstrap.py" in said
