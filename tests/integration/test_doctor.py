"""The doctor names the layer that fails: real ports, real TLS, a real coordinator."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from heterorl.v1 import merge_pb2, merge_pb2_grpc
from node.checks.check import Needs, examine
from node.checks.machine_checks import listen_check
from node.commands.cli import main
from node.commands.doctor import connection_probe, way_checks
from node.errors import Reason, RefusedError
from node.identity.identity_store import IDENTITY_DIRECTORY, Identity, save_identity
from node.rpc import proxy
from node.rpc.address import split_target
from node.values.operator_order import REVOKE, Order
from node.values.roles import Role
from support.hub import RunningHub, running_hub
from support.identity import MadeRun, make_run
from support.orders import give
from support.rpc import serving

Doctor = Callable[..., Awaitable[tuple[int, dict[str, dict[str, Any]]]]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Run the command; return its exit code and the last finding of each layer."""

    async def run(*argv: object) -> tuple[int, dict[str, dict[str, Any]]]:
        capsys.readouterr()
        code = await asyncio.to_thread(main, ["doctor", "--json", *map(str, argv)])
        findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return code, {finding["layer"]: finding for finding in findings}

    return run


@pytest.fixture
async def hub(made: MadeRun, model_dir: Path) -> AsyncIterator[RunningHub]:
    async with running_hub(made, model_dir=model_dir) as hub:
        yield hub


def machine_of(made: MadeRun, directory: Path, identity: Identity | None) -> Path:
    """Return the state directory of a peer's machine."""
    directory.mkdir(mode=0o700)
    made.run.save(directory / "run.json")
    if identity is not None:
        save_identity(identity, directory / identity.role / IDENTITY_DIRECTORY)
    return directory


async def test_a_member_on_a_good_way_passes_every_layer_and_no_proxy_leads_to_this_machine(
    made: MadeRun, hub: RunningHub, doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    here = machine_of(made, tmp_path / "here", made.sampler)
    code, found = await doctor("--state-dir", here, "--coordinator", hub.address)
    assert code == 0
    way = ("proxy", "dns", "tcp", "tls", "identity", "protocol", "clock", "bandwidth")
    assert [found[layer]["grade"] for layer in way] == ["ok"] * len(way)
    assert "https_proxy (http://127.0.0.1:9) is not used" in found["proxy"]["what"]
    assert "Mbit/s from the coordinator" in found["bandwidth"]["what"]
    assert {"disk", "device", "sandbox", "kernel"} < set(found)


async def test_before_there_is_a_certificate_the_way_is_looked_at_as_far_as_it_goes(
    made: MadeRun, hub: RunningHub, doctor: Doctor, tmp_path: Path
) -> None:
    code, found = await doctor("--coordinator", hub.address, "--state-dir", tmp_path)
    assert (code, found["tcp"]["grade"], found["tls"]["grade"]) == (0, "ok", "warn")
    here = machine_of(made, tmp_path / "here", None)
    code, found = await doctor("--coordinator", hub.address, "--state-dir", here)
    assert (code, found["tls"]["grade"], found["identity"]["grade"]) == (0, "ok", "warn")


@pytest.mark.parametrize(
    ("case", "layer", "said", "fix"),
    [
        ("a name of nobody", "dns", "does not resolve", ""),
        ("a free port", "tcp", "is not reached", ""),
        ("a run of the same name", "tls", "is not that of a hub of example", ""),
        ("no answer", "tls", ": no answer within 0.3 s", "mtu 1280"),
        ("revoked", "identity", "was revoked", ""),
        ("the enrolment port", "protocol", "the enrolment port of run", ""),
    ],
)
async def test_what_fails_is_named_with_its_fix_and_what_lies_behind_is_not_tried(
    made: MadeRun,
    hub: RunningHub,
    doctor: Doctor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    layer: str,
    said: str,
    fix: str,
) -> None:
    here, address = machine_of(made, tmp_path / "here", made.sampler), hub.address
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if case == "a name of nobody":
            address = "no-such-host.invalid:7700"
        elif case in ("a free port", "no answer"):
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            for module in (way_checks, connection_probe):
                monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
        elif case == "a run of the same name":
            make_run(tmp_path / "other", now=time.time()).run.save(here / "run.json")
        elif case == "revoked":
            await give(made.directory / Role.COORDINATOR, Order(REVOKE, made.sampler.node_id, order_id="1"))
        elif case == "the enrolment port":
            address = str(hub.hub.enrolment_address)
        if case == "a free port":
            silent.close()
        code, found = await doctor("--state-dir", here, "--coordinator", address)
    assert (code, found[layer]["grade"]) == (1, "fail")
    assert said in found[layer]["what"]
    assert found[layer]["fix"]
    assert fix in found[layer]["fix"]
    assert "bandwidth" not in found


class ConnectProxy:
    """An HTTP proxy that leads any name to one address, or refuses."""

    def __init__(self, target: str, *, answer: str = "200 OK") -> None:
        self.asked: list[str] = []
        self._target = target
        self._answer = answer

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://user:word@127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(f"HTTP/1.1 {self._answer}\r\n\r\n".encode())
        with contextlib.suppress(OSError):
            if self._answer.startswith("200"):
                there = await asyncio.open_connection(*split_target(self._target))
                await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))
            writer.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1 << 16):
        writer.write(chunk)
    writer.close()


async def test_where_only_a_proxy_leads_the_doctor_goes_by_it_as_grpc_does(
    made: MadeRun, hub: RunningHub, doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "addresses_here", lambda name: ())
    monkeypatch.setattr(way_checks, "addresses_here", lambda name: ())
    monkeypatch.setattr(proxy, "_followed", {})
    here = machine_of(made, tmp_path / "here", made.sampler)
    way = ConnectProxy(hub.address)
    async with way.open() as url:
        monkeypatch.setenv("https_proxy", url)
        code, found = await doctor("--state-dir", here, "--coordinator", "hub.invalid:7700")
    layers = ("proxy", "tls", "identity", "protocol", "clock", "bandwidth")
    assert (code, [found[layer]["grade"] for layer in layers]) == (0, ["ok"] * len(layers))
    assert not {"dns", "tcp"} & set(found)
    assert "word" not in str(found)
    assert all("CONNECT hub.invalid:7700 HTTP/1.1" in one for one in way.asked)
    assert all("Basic dXNlcjp3b3Jk" in one for one in way.asked)


@pytest.mark.parametrize("answer", ["403 Forbidden", None])
async def test_a_proxy_that_does_not_lead_there_is_named_with_its_variable(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    monkeypatch.setattr(way_checks, "addresses_here", lambda name: ())
    async with ConnectProxy("", answer=answer or "").open() as url:
        monkeypatch.setenv("http_proxy", url if answer else "http://127.0.0.1:9")
        code, found = await doctor("--state-dir", tmp_path, "--coordinator", "hub.invalid:7700")
    assert (code, found["proxy"]["grade"]) == (1, "fail")
    assert ("403 Forbidden" if answer else "refused") in found["proxy"]["what"]
    assert found["proxy"]["fix"].startswith("Unset http_proxy, or name hub.invalid in no_proxy")


async def test_with_the_daemons_flags_its_dry_run_is_part_of_it(
    made: MadeRun, hub: RunningHub, doctor: Doctor, tmp_path: Path
) -> None:
    here = machine_of(made, tmp_path / "here", made.sampler)
    flags = ("--role", "sampler", "--state-dir", here, "--coordinator", hub.address)
    code, found = await doctor(*flags, "--set", f"sampler.model_dir={tmp_path / 'no-model'}")
    assert code == 1
    assert (found["model"]["grade"], "no-model" in found["model"]["what"]) == ("fail", True)
    assert found["run file"]["grade"] == found["identity"]["grade"] == "ok"
    assert found["clock"]["grade"] == "ok"
    code, found = await doctor(*flags, "--set", "sampler.threads=many")
    assert (code, found["configuration"]["grade"]) == (1, "fail")


class RefusingLearner(merge_pb2_grpc.MergeServiceServicer):
    """Refuses every stream, as a learner does one that names no model, or while it starts."""

    def __init__(self, reason: Reason) -> None:
        self._reason = reason

    async def Contribute(  # noqa: N802
        self, request: AsyncIterator[merge_pb2.ContributeRequest], _: object
    ) -> AsyncIterator[merge_pb2.ContributeResponse]:
        hello = (await anext(request)).hello
        assert not hello.layout_digest
        assert not hello.held_group_ids
        raise RefusedError(self._reason, "so it says")
        yield


@pytest.mark.parametrize(
    ("case", "grade", "said"),
    [
        (Reason.LAYOUT_MISMATCH, "ok", "contributor"),
        (Reason.BUSY, "fail", "so it says"),
        ("is away", "fail", "is not reached"),
        ("is the coordinator", "fail", "is not reached"),
        ("no certificate", "warn", "certificate"),
    ],
)
async def test_a_contributor_asks_its_learner_whether_it_is_let_in(
    made: MadeRun, hub: RunningHub, doctor: Doctor, tmp_path: Path, case: str, grade: str, said: str
) -> None:
    here = machine_of(made, tmp_path / "here", None if case == "no certificate" else made.contributor)
    learner = RefusingLearner(case if isinstance(case, Reason) else Reason.LAYOUT_MISMATCH)
    add = partial(merge_pb2_grpc.add_MergeServiceServicer_to_server, learner)
    async with serving(made, add, identity=made.learner) as served:
        asked = {"is away": "127.0.0.1:9", "is the coordinator": hub.address}.get(case, served.address)
        _, found = await doctor(
            *("--role", "contributor", "--state-dir", here, "--run-file", here / "run.json"),
            *("--coordinator", hub.address, "--set", f"contributor.learner={asked}"),
            *("--set", f"contributor.model_dir={here}"),
        )
    assert (found["learner"]["grade"], said in found["learner"]["what"]) == (grade, True), found["learner"]


@pytest.mark.parametrize(
    ("address", "grade"),
    [("0.0.0.0:0", "ok"), ("127.0.0.1:0", "warn"), ("192.0.2.1:7720", "fail"), ("taken", "warn")],
)
def test_a_learner_that_merges_can_listen_for_contributors(address: str, grade: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        check = listen_check(taken if address == "taken" else address, key="learner.merge.listen")
        (finding,) = examine([check], needs=Needs.MACHINE)
    assert finding.grade == grade
    assert "learner.merge.listen" in finding.what
    assert (os.strerror(errno.EADDRINUSE) in finding.what) == (address == "taken")
