"""Checks of a machine and of its way to the coordinator, layer by layer; each finding names what mends it.

machine   disk, device, sandbox, congestion control
way       dns -> tcp -> tls -> identity, protocol, clock -> bandwidth
          proxy ------> tls: where a variable of the environment names one and gRPC follows it
              to each address of the coordinator; ends at the first layer that fails
"""

import asyncio
import enum
import os
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from heterorl.v1 import model_pb2, model_pb2_grpc
from node.clock import moment
from node.commands.connection_probe import TIMEOUT_S, connected, reason_of
from node.commands.status_command import fetch_status
from node.device import AUTO, chosen_device
from node.errors import Reason, RefusedError
from node.identity.identity_store import CERTIFICATE_FILE as CERTIFICATE
from node.identity.identity_store import IDENTITY_DIRECTORY, KEY_FILE, Identity
from node.identity.peer import server_name
from node.identity.run_description import RunDescription
from node.rpc.address import join_address, split_target, split_targets
from node.rpc.channel import ConnectionLost, Purpose, classified, dial
from node.rpc.clock_comparison import compare_clocks
from node.rpc.proxy import OTHERS, Proxy, addresses_here, proxy_for, proxy_in
from node.run import PeerQuery, Role

_PROBE_BYTES: Final = 4 << 20
_PROBE_S: Final = 10.0
"""The bandwidth probe reads so much of the base model, for so long at most."""

_SLOW_BYTES_PER_S: Final = 250e3
"""2 Mbit/s: a keyframe of 1 GB takes an hour, and a large step longer than it took to make."""

_SLOW_LOOKUP_S: Final = 2.0
"""A name server is asked again after 5 s by default; one that answers takes milliseconds."""

_CLOCK_S: Final = 60.0
"""As in the status: above any link's delay, far below what certificates allow."""

_FREE_BYTES: Final = 5e9
_FSYNC_S: Final = 0.05
"""Ten times a disk's; a hub commits to its ledger before it answers."""

_GPU_PROBE: Final = """
import torch
x = torch.randn(512, 512, device="cuda")
assert bool(torch.isfinite(x @ x).all())
print(torch.cuda.get_device_name(), f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB")
"""
_GPU_PROBE_S: Final = 120.0


class Grade(enum.StrEnum):
    """How well a layer does."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    layer: str
    grade: Grade
    what: str
    fix: str = ""
    """An action that mends it; empty where nothing needs mending."""


@dataclass(frozen=True, slots=True)
class Patient:
    """The machine and the way that are looked at."""

    state_dir: Path
    roles: frozenset[Role]
    coordinator: str | None
    run: RunDescription | None
    identity: Identity | None


def machine(patient: Patient) -> Iterator[Finding]:
    """Yield what this machine has and lacks."""
    yield from _disk(patient.state_dir)
    if not patient.roles or patient.roles & {Role.LEARNER, Role.SAMPLER}:
        yield _device()
        yield _sandbox()
    yield _congestion(is_hub=bool(patient.roles & {Role.COORDINATOR, Role.RELAY}))


async def way(patient: Patient) -> AsyncIterator[Finding]:
    """Yield what each layer on the way to the coordinator says, up to the first that fails."""
    if patient.coordinator is None:
        yield Finding("dns", Grade.WARN, "no coordinator is named", "Add --coordinator HOST:PORT.")
        return
    for address in split_targets(patient.coordinator):
        async for finding in _way_to(address, patient):
            yield finding


async def _way_to(address: str, patient: Patient) -> AsyncIterator[Finding]:
    host, port = split_target(address)
    proxy = await asyncio.to_thread(partial(proxy_for, host, environ=os.environ, addresses_of=addresses_here))
    if proxy is not None:
        checks = [partial(_proxy, host, port, proxy)]
    else:
        if (named := proxy_in(os.environ)) is not None:
            what = f"{named} is not used: {host} is loopback, private, or named in no_proxy"
            yield Finding("proxy", Grade.OK, what)
        checks = [partial(_dns, host), partial(_tcp, host, port)]
    for check in (*checks, partial(_tls, host, port, patient, proxy)):
        finding = await check()
        yield finding
        if finding.grade is Grade.FAIL:
            return
    if patient.identity is None:
        what = f"there is no certificate below {patient.state_dir}: what needs one is not checked"
        yield Finding(
            "identity", Grade.WARN, what, "Join first (`heterorl-node join TOKEN`), or add --state-dir."
        )
        return
    async for finding in _answers(address, patient.identity):
        yield finding
    if finding.layer == "clock" and finding.grade is not Grade.FAIL:  # the last one: a call was answered
        yield await _bandwidth(address, patient.identity)


async def _proxy(host: str, port: int, proxy: Proxy) -> Finding:
    """Ask the proxy for a connection, as gRPC does; the proxy looks the name up."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S), connected(host, port, proxy):
            took = _ms(began)
    except (OSError, TimeoutError, EOFError, ValueError) as error:
        what = f"{proxy} does not lead to {join_address(host, port)}: {reason_of(error)}"
        fix = (
            f"Unset {proxy.variable}, or name {host} in no_proxy, where the daemon is started (a unit: "
            "`systemctl edit`); or have the proxy allow CONNECT to this port. See docs/failures/proxy.md."
        )
        return Finding("proxy", Grade.FAIL, what, fix)
    return Finding("proxy", Grade.OK, f"{proxy} opens the way to {join_address(host, port)}, in {took}")


async def _dns(host: str) -> Finding:
    began = time.monotonic()
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        what = f"{host} does not resolve: {error.strerror}"
        return Finding("dns", Grade.FAIL, what, "Correct the name, or this machine's name servers.")
    addresses = ", ".join(sorted({str(one[4][0]) for one in found}))
    what = f"{host} is {addresses}, in {_ms(began)}"
    if time.monotonic() - began > _SLOW_LOOKUP_S:
        fix = "A name server does not answer: see /etc/resolv.conf, `resolvectl status`."
        return Finding("dns", Grade.WARN, what, fix)
    return Finding("dns", Grade.OK, what)


async def _tcp(host: str, port: int) -> Finding:
    began = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S), connected(host, port):
            took = _ms(began)
    except TimeoutError:
        what = f"port {port} does not answer within {TIMEOUT_S:.0f} s"
        fix = "Open it in the firewall of the coordinator's host and of its provider."
        if unread := [name for name in OTHERS if name in os.environ]:
            fix += (
                f" If only a proxy leads there: set https_proxy, in small letters; {unread[0]} is not read."
            )
        return Finding("tcp", Grade.FAIL, what, fix)
    except OSError as error:
        what = f"port {port} is not reached: {reason_of(error)}"
        fix = (
            "Start the coordinator, and see coordinator.listen: 127.0.0.1 is reached from its own host only."
        )
        return Finding("tcp", Grade.FAIL, what, fix)
    return Finding("tcp", Grade.OK, f"port {port} accepts, in {took}")


async def _tls(host: str, port: int, patient: Patient, proxy: Proxy | None) -> Finding:
    run, identity = patient.run, patient.identity
    if run is None:
        return Finding("tls", Grade.WARN, "not checked: there is no run.json", "Name one with --run-file.")
    context = ssl.create_default_context(cadata=run.ca_certificate_pem.decode())
    context.set_alpn_protocols(["h2"])
    if identity is not None:
        directory = patient.state_dir / identity.role / IDENTITY_DIRECTORY
        context.load_cert_chain(directory / CERTIFICATE, directory / KEY_FILE)
    try:
        name = server_name(run.run_id, Role.COORDINATOR)
        async with (
            asyncio.timeout(TIMEOUT_S),
            connected(host, port, proxy, tls=context, name=name) as (reader, writer),
        ):
            # HTTP/2 begins with the server's settings; a hub that refuses the certificate ends instead.
            is_let_in = bool(await reader.read(1))
            version = writer.get_extra_info("ssl_object").version()
    except ssl.SSLCertVerificationError as error:
        what = f"the server's certificate is not that of a hub of {run.run_id}: {error.verify_message}"
        fix = "Check the address, that run.json is this run's, and this machine's clock."
        return Finding("tls", Grade.FAIL, what, fix)
    except (OSError, TimeoutError, EOFError, ValueError) as error:
        what = f"no handshake on port {port}: {reason_of(error)}"
        fix = "Use the members port (coordinator.listen), and see whether something in between ends TLS."
        if isinstance(error, TimeoutError):
            fix += (
                " If that is the right port, large packets may be lost on the way, as in tunnels: try "
                "`ip link set dev DEVICE mtu 1280`, and let ICMP through firewalls."
            )
        return Finding("tls", Grade.FAIL, what, fix)
    if not is_let_in and identity is not None:
        what = f"the hub closes the connection on the certificate of {identity.node_id}"
        fix = (
            f"It is valid until {moment(identity.not_after_s)}: see both clocks, or enrol anew with a token."
        )
        return Finding("tls", Grade.FAIL, what, fix)
    return Finding("tls", Grade.OK, f"{version}, a hub of run {run.run_id}")


async def _answers(coordinator: str, identity: Identity) -> AsyncIterator[Finding]:
    """Yield what an answered call says of identity, protocol and clock."""
    name = identity.node_id
    began, began_at = time.monotonic(), time.time()
    try:
        status = await fetch_status(coordinator, identity, query=PeerQuery(limit=1))
    except (RefusedError, ConnectionLost) as error:
        if (clocks := compare_clocks(error, identity, now=time.time())) is not None:
            yield Finding("clock", Grade.FAIL, clocks.what, clocks.fix)
            return
        if isinstance(error, RefusedError) and error.reason is Reason.STANDBY:
            yield Finding("protocol", Grade.OK, f"{coordinator} stands by: another coordinator leads")
            return
        is_us = isinstance(error, RefusedError) and error.reason in (
            Reason.UNAUTHENTICATED,
            Reason.REVOKED,
            Reason.EXPIRED,
        )
        fix = "If it was revoked: `heterorl-node revoke --undo` on the coordinator's host."
        if not is_us:
            fix = "Run the same version everywhere, and see the coordinator's log."
        yield Finding("identity" if is_us else "protocol", Grade.FAIL, str(error), fix)
        return
    took_s = time.monotonic() - began
    left_days = (identity.not_after_s - time.time()) / 86400
    if left_days < 14:
        fix = f"Enrol anew: a token made with --node-id {name}, and the old identity moved away."
        yield Finding("identity", Grade.WARN, f"{name} expires in {left_days:.0f} days", fix)
    else:
        yield Finding("identity", Grade.OK, f"{name} is let in, for {left_days:.0f} days more")
    yield Finding(
        "protocol", Grade.OK, f"the coordinator answers in {1000 * took_s:.0f} ms, handshake included"
    )
    offset_s = status.now_s - (began_at + took_s / 2)
    grade = Grade.OK if abs(offset_s) < _CLOCK_S else Grade.WARN
    side = "behind" if offset_s > 0 else "ahead of"
    fix = "" if grade is Grade.OK else "Set the clock that is wrong; NTP keeps both right."
    yield Finding("clock", grade, f"{abs(offset_s):.1f} s {side} the coordinator's", fix)


async def _bandwidth(coordinator: str, identity: Identity) -> Finding:
    """Read some of the base model, where the coordinator hands it out."""
    received, began = 0, time.monotonic()
    try:
        async with dial(coordinator, identity, purpose=Purpose.BULK, now=time.time()) as channel:
            stub: model_pb2_grpc.ModelServiceAsyncStub = model_pb2_grpc.ModelServiceStub(channel)
            with classified():
                listed = await stub.ListModel(model_pb2.ListModelRequest(), timeout=TIMEOUT_S)
                files = sorted(listed.files, key=lambda file: file.size_bytes)
                if not files:
                    return Finding(
                        "bandwidth", Grade.OK, "not measured: no coordinator.model_dir to read from"
                    )
                request = model_pb2.FetchBlockRequest(name=files[-1].name, block=0)
                began = time.monotonic()
                async for response in stub.FetchBlock(request, timeout=TIMEOUT_S):
                    received += len(response.data)
                    if received >= _PROBE_BYTES or time.monotonic() > began + _PROBE_S:
                        break
    except (RefusedError, ConnectionLost) as error:
        if not received:
            return Finding("bandwidth", Grade.OK, f"not measured: {error}")
    rate = received / max(time.monotonic() - began, 1e-6)
    what = f"{rate * 8 / 1e6:.1f} Mbit/s from the coordinator, over one connection ({received} bytes)"
    if received >= _PROBE_BYTES and rate < _SLOW_BYTES_PER_S:
        return Finding("bandwidth", Grade.WARN, what, "Put a relay near, or use a faster line.")
    return Finding("bandwidth", Grade.OK, what)


def _disk(directory: Path) -> Iterator[Finding]:
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    what = f"{free / 1e9:.1f} GB free at {there}"
    if free < _FREE_BYTES:
        yield Finding(
            "disk", Grade.WARN, what, "Make room: a sampler keeps two copies of the model, a hub more."
        )
    else:
        yield Finding("disk", Grade.OK, what)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            fsync_s = statistics.median(_synced(file.fileno()) for _ in range(5))
    except OSError as error:
        yield Finding(
            "disk", Grade.FAIL, f"{there} cannot be written: {error.strerror}", "Choose another --state-dir."
        )
        return
    what = f"a sync takes {1000 * fsync_s:.1f} ms"
    if fsync_s > _FSYNC_S:
        yield Finding("disk", Grade.WARN, what, "Put the state directory on a local disk that is less busy.")
    else:
        yield Finding("disk", Grade.OK, what)


def _synced(descriptor: int) -> float:
    os.pwrite(descriptor, os.urandom(4096), 0)
    began = time.monotonic()
    os.fsync(descriptor)
    return time.monotonic() - began


def _device() -> Finding:
    device = chosen_device(AUTO)
    if find_spec("torch") is None:
        fix = "Learner and sampler need it: install the extra of the role, '.[sampler]' or '.[learner]'."
        return Finding("device", Grade.WARN, "torch is not installed", fix)
    if device == "cpu":
        if any(Path("/dev").glob("nvidia[0-9]*")):
            fix = "Install torch's CUDA build (without deploy/constraints.txt); see CUDA_VISIBLE_DEVICES too."
            return Finding("device", Grade.WARN, "there is a GPU, and torch cannot use it: cpu", fix)
        return Finding("device", Grade.OK, f"cpu, {os.cpu_count()} cores; there is no GPU")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _GPU_PROBE],
            capture_output=True,
            text=True,
            timeout=_GPU_PROBE_S,
            check=False,
        )
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    except subprocess.TimeoutExpired:
        return Finding(
            "device", Grade.FAIL, f"{device} does not answer within {_GPU_PROBE_S:.0f} s", _GPU_FIX
        )
    said = lines[-1][:200] if lines else f"exit code {done.returncode}"
    if done.returncode:
        return Finding("device", Grade.FAIL, f"{device} does not compute: {said}", _GPU_FIX)
    return Finding("device", Grade.OK, f"{device}: {said}")


_GPU_FIX: Final = "See nvidia-smi, and whether the driver is new enough for this build of torch."


def _sandbox() -> Finding:
    """Try what runs of the grader ``code`` need of a sampler's machine."""
    fix = "Only runs with the grader code need it: install bubblewrap, and allow user namespaces."
    if (bwrap := shutil.which("bwrap")) is None:
        return Finding("sandbox", Grade.WARN, "bubblewrap is not installed", fix)
    command = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "true"]
    try:
        trial = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Finding("sandbox", Grade.WARN, f"bubblewrap does not end within {TIMEOUT_S:.0f} s", fix)
    if trial.returncode:
        return Finding("sandbox", Grade.WARN, f"bubblewrap does not run: {trial.stderr.strip()[:200]}", fix)
    return Finding("sandbox", Grade.OK, "bubblewrap runs")


def _congestion(*, is_hub: bool) -> Finding:
    try:
        name = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return Finding("kernel", Grade.OK, "the congestion control cannot be read here")
    if name == "bbr" or not is_hub:
        return Finding(
            "kernel", Grade.OK, f"congestion control {name}" + ("" if is_hub else "; it matters at hubs")
        )
    fix = "sysctl -w net.ipv4.tcp_congestion_control=bbr, on this machine, which sends the weights."
    return Finding("kernel", Grade.WARN, f"congestion control {name}: long links carry less", fix)


def _ms(began: float) -> str:
    return f"{1000 * (time.monotonic() - began):.0f} ms"
