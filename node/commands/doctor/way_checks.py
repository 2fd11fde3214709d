"""Checks of the way to each address of the coordinator, layer by layer; each finding names what mends it.

    dns -> tcp -> tls -> call: identity, protocol, clock -> bandwidth
    proxy ------> tls: where a variable of the environment names one and gRPC follows it

A layer is looked at where the one before it does not fail.
"""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from heterorl.v1 import model_pb2, model_pb2_grpc
from node.checks.check import Check, Finding, Grade, Needs
from node.commands.doctor.connection_probe import TIMEOUT_S, connected, reason_of
from node.commands.status.status_command import fetch_status
from node.errors import Reason, RefusedError
from node.identity.identity_store import CERTIFICATE_FILE as CERTIFICATE
from node.identity.identity_store import IDENTITY_DIRECTORY, KEY_FILE, Identity
from node.identity.peer import server_name
from node.identity.run_description import RunDescription
from node.rpc.address import join_address, split_target, split_targets
from node.rpc.call_ends import ConnectionLost, classified
from node.rpc.channel import Purpose, dial
from node.rpc.clock_comparison import compare_clocks
from node.rpc.proxy import OTHERS, Proxy, addresses_here, proxy_for, proxy_in
from node.system.clock import moment
from node.values.roles import Role
from node.values.run import PeerQuery

_PROBE_BYTES: Final = 4 << 20
_PROBE_S: Final = 10.0
"""The bandwidth probe reads so much of the base model, for so long at most."""

_SLOW_BYTES_PER_S: Final = 250e3
"""2 Mbit/s: a keyframe of 1 GB takes an hour, and a large step longer than it took to make."""

_SLOW_LOOKUP_S: Final = 2.0
"""A name server is asked again after 5 s by default; one that answers takes milliseconds."""

_LEFT_DAYS: Final = 14.0
"""Time for an operator to act; certificates renew themselves long before."""

_CLOCK_S: Final = 60.0
"""As in the status: above any link's delay, far below what certificates allow."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls the coordinator."""

    state_dir: Path
    run: RunDescription | None
    identity: Identity | None


def way_checks(coordinator: str | None, caller: Caller) -> Iterator[Check]:
    """Yield the checks of the way to each of the coordinator's addresses; None: nobody has named one."""
    if coordinator is None:
        unnamed = Finding("dns", Grade.WARN, "no coordinator is named", "Add --coordinator HOST:PORT.")
        yield Check("dns", Needs.NETWORK, lambda: [unnamed])
        return
    for address in split_targets(coordinator):
        yield from _Way(address, caller).checks()


@dataclass(slots=True)
class _Way:
    """The way to one address, and what its first layers have found."""

    address: str
    caller: Caller
    host: str = field(init=False)
    port: int = field(init=False)
    proxy: Proxy | None = None
    is_answered: bool = False
    """Whether a call was answered."""

    def __post_init__(self) -> None:
        self.host, self.port = split_target(self.address)

    def checks(self) -> Iterator[Check]:
        layers = {
            "proxy": self._proxy,
            "dns": self._dns,
            "tcp": self._tcp,
            "tls": self._tls,
            "identity": self._call,
            "bandwidth": self._bandwidth,
        }
        before: tuple[Check, ...] = ()
        for name, look in layers.items():
            check = Check(name, Needs.NETWORK, partial(_found_by, look), before)
            before = (check,)
            yield check

    async def _proxy(self) -> list[Finding]:
        """Ask the proxy for a connection, where there is one, as gRPC does; the proxy looks the name up."""
        host, port = self.host, self.port
        find = partial(proxy_for, host, environ=os.environ, addresses_of=addresses_here)
        proxy = self.proxy = await asyncio.to_thread(find)
        if proxy is None:
            if (named := proxy_in(os.environ)) is not None:
                what = f"{named} is not used: {host} is loopback, private, or named in no_proxy"
                return [Finding("proxy", Grade.OK, what)]
            return []
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
            return [Finding("proxy", Grade.FAIL, what, fix)]
        return [Finding("proxy", Grade.OK, f"{proxy} opens the way to {join_address(host, port)}, in {took}")]

    async def _dns(self) -> list[Finding]:
        if self.proxy is not None:
            return []
        host, began = self.host, time.monotonic()
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            what = f"{host} does not resolve: {error.strerror}"
            return [Finding("dns", Grade.FAIL, what, "Correct the name, or this machine's name servers.")]
        addresses = ", ".join(sorted({str(one[4][0]) for one in found}))
        what = f"{host} is {addresses}, in {_ms(began)}"
        if time.monotonic() - began > _SLOW_LOOKUP_S:
            fix = "A name server does not answer: see /etc/resolv.conf, `resolvectl status`."
            return [Finding("dns", Grade.WARN, what, fix)]
        return [Finding("dns", Grade.OK, what)]

    async def _tcp(self) -> list[Finding]:
        if self.proxy is not None:
            return []
        host, port, began = self.host, self.port, time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S), connected(host, port):
                took = _ms(began)
        except TimeoutError:
            what = f"port {port} does not answer within {TIMEOUT_S:.0f} s"
            fix = "Open it in the firewall of the coordinator's host and of its provider."
            if unread := [name for name in OTHERS if name in os.environ]:
                fix += " If only a proxy leads there: set https_proxy, in small letters; "
                fix += f"{unread[0]} is not read."
            return [Finding("tcp", Grade.FAIL, what, fix)]
        except OSError as error:
            what = f"port {port} is not reached: {reason_of(error)}"
            fix = "Start the coordinator, and see coordinator.listen: "
            fix += "127.0.0.1 is reached from its own host only."
            return [Finding("tcp", Grade.FAIL, what, fix)]
        return [Finding("tcp", Grade.OK, f"port {port} accepts, in {took}")]

    async def _tls(self) -> list[Finding]:
        host, port, run, identity = self.host, self.port, self.caller.run, self.caller.identity
        if run is None:
            return [
                Finding("tls", Grade.WARN, "not checked: there is no run.json", "Name one with --run-file.")
            ]
        context = ssl.create_default_context(cadata=run.ca_certificate_pem.decode())
        context.set_alpn_protocols(["h2"])
        if identity is not None:
            directory = self.caller.state_dir / identity.role / IDENTITY_DIRECTORY
            context.load_cert_chain(directory / CERTIFICATE, directory / KEY_FILE)
        try:
            name = server_name(run.run_id, Role.COORDINATOR)
            async with (
                asyncio.timeout(TIMEOUT_S),
                connected(host, port, self.proxy, tls=context, name=name) as (reader, writer),
            ):
                # HTTP/2 begins with the server's settings; a hub that refuses the certificate ends instead.
                is_let_in = bool(await reader.read(1))
                version = writer.get_extra_info("ssl_object").version()
        except ssl.SSLCertVerificationError as error:
            what = f"the server's certificate is not that of a hub of {run.run_id}: {error.verify_message}"
            fix = "Check the address, that run.json is this run's, and this machine's clock."
            return [Finding("tls", Grade.FAIL, what, fix)]
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            what = f"no handshake on port {port}: {reason_of(error)}"
            fix = "Use the members port (coordinator.listen), and see whether something in between ends TLS."
            if isinstance(error, TimeoutError):
                fix += (
                    " If that is the right port, large packets may be lost on the way, as in tunnels: try "
                    "`ip link set dev DEVICE mtu 1280`, and let ICMP through firewalls."
                )
            return [Finding("tls", Grade.FAIL, what, fix)]
        if not is_let_in and identity is not None:
            what = f"the hub closes the connection on the certificate of {identity.node_id}"
            until = moment(identity.not_after_s)
            fix = f"It is valid until {until}: see both clocks, or enrol anew with a token."
            return [Finding("tls", Grade.FAIL, what, fix)]
        return [Finding("tls", Grade.OK, f"{version}, a hub of run {run.run_id}")]

    async def _call(self) -> list[Finding]:
        """Yield what an answered call says of identity, protocol and clock."""
        coordinator, identity = self.address, self.caller.identity
        if identity is None:
            what = f"there is no certificate below {self.caller.state_dir}: what needs one is not checked"
            fix = "Join first (`heterorl-node join TOKEN`), or add --state-dir."
            return [Finding("identity", Grade.WARN, what, fix)]
        began, began_at = time.monotonic(), time.time()
        try:
            status = await fetch_status(coordinator, identity, query=PeerQuery(limit=1))
        except (RefusedError, ConnectionLost) as error:
            if (clocks := compare_clocks(error, identity, now=time.time())) is not None:
                return [Finding("clock", Grade.FAIL, clocks.what, clocks.fix)]
            if isinstance(error, RefusedError) and error.reason is Reason.STANDBY:
                return [Finding("protocol", Grade.OK, f"{coordinator} stands by: another coordinator leads")]
            is_us = isinstance(error, RefusedError) and error.reason in (
                Reason.UNAUTHENTICATED,
                Reason.REVOKED,
                Reason.EXPIRED,
            )
            fix = "If it was revoked: `heterorl-node revoke --undo` on the coordinator's host."
            if not is_us:
                fix = "Run the same version everywhere, and see the coordinator's log."
            return [Finding("identity" if is_us else "protocol", Grade.FAIL, str(error), fix)]
        took_s = time.monotonic() - began
        self.is_answered = True
        ms = 1000 * took_s
        return [
            _term(identity),
            Finding("protocol", Grade.OK, f"the coordinator answers in {ms:.0f} ms, handshake included"),
            _clock(status.now_s - (began_at + took_s / 2)),
        ]

    async def _bandwidth(self) -> list[Finding]:
        """Read some of the base model, where the coordinator hands it out."""
        coordinator, identity = self.address, self.caller.identity
        if not self.is_answered or identity is None:
            return []
        received, began = 0, time.monotonic()
        try:
            async with dial(coordinator, identity, purpose=Purpose.BULK, now=time.time()) as channel:
                stub: model_pb2_grpc.ModelServiceAsyncStub = model_pb2_grpc.ModelServiceStub(channel)
                with classified():
                    listed = await stub.ListModel(model_pb2.ListModelRequest(), timeout=TIMEOUT_S)
                    files = sorted(listed.files, key=lambda file: file.size_bytes)
                    if not files:
                        return [
                            Finding(
                                "bandwidth", Grade.OK, "not measured: no coordinator.model_dir to read from"
                            )
                        ]
                    request = model_pb2.FetchBlockRequest(name=files[-1].name, block=0)
                    began = time.monotonic()
                    async for response in stub.FetchBlock(request, timeout=TIMEOUT_S):
                        received += len(response.data)
                        if received >= _PROBE_BYTES or time.monotonic() > began + _PROBE_S:
                            break
        except (RefusedError, ConnectionLost) as error:
            if not received:
                return [Finding("bandwidth", Grade.OK, f"not measured: {error}")]
        rate = received / max(time.monotonic() - began, 1e-6)
        what = f"{rate * 8 / 1e6:.1f} Mbit/s from the coordinator, over one connection ({received} bytes)"
        if received >= _PROBE_BYTES and rate < _SLOW_BYTES_PER_S:
            return [Finding("bandwidth", Grade.WARN, what, "Put a relay near, or use a faster line.")]
        return [Finding("bandwidth", Grade.OK, what)]


def _term(identity: Identity) -> Finding:
    name, left_days = identity.node_id, (identity.not_after_s - time.time()) / 86400
    if left_days < _LEFT_DAYS:
        fix = f"Enrol anew: a token made with --node-id {name}, and the old identity moved away."
        return Finding("identity", Grade.WARN, f"{name} expires in {left_days:.0f} days", fix)
    return Finding("identity", Grade.OK, f"{name} is let in, for {left_days:.0f} days more")


def _clock(offset_s: float) -> Finding:
    side = "behind" if offset_s > 0 else "ahead of"
    what = f"{abs(offset_s):.1f} s {side} the coordinator's"
    if abs(offset_s) < _CLOCK_S:
        return Finding("clock", Grade.OK, what)
    return Finding("clock", Grade.WARN, what, "Set the clock that is wrong; NTP keeps both right.")


def _found_by(look: Callable[[], Coroutine[None, None, list[Finding]]]) -> list[Finding]:
    return asyncio.run(look())


def _ms(began: float) -> str:
    return f"{1000 * (time.monotonic() - began):.0f} ms"
