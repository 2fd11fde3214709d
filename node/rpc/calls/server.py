"""A gRPC server as a service: it binds, serves behind the interceptor, and drains.

bound -> ready -> serving, rechecking live streams every few seconds
      -> draining: no new rpcs, endless streams end, the others have a grace period -> stopped
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from node.errors import StartupError
from node.identity.identity_store import Identity
from node.identity.own_identity import OwnIdentity
from node.rpc.address import is_loopback, join_address, split_address
from node.rpc.calls.interceptor import RpcInterceptor
from node.rpc.calls.live_rpcs import Admission, RpcLimits
from node.rpc.channel import KEEPALIVE, Keepalive
from node.rpc.strangers.connection_guard import ConnectionGuard
from node.rpc.strangers.private_socket import PrivateSocket, private_socket
from node.rpc.strangers.strangers_gate import GateLimits, StrangersGate
from node.system.waits import wait_at_most
from node.values.limits import MESSAGE_BYTES, ROLLOUT_MESSAGE_BYTES

logger = logging.getLogger(__name__)

_PENDING_RPCS: Final = 10_000
_MOST_PENDING_RPCS: Final = 20_000
"""Calls that wait for a thread. Without both, gRPC sheds a burst of calls on one connection as CANCELLED."""

_RECORD_BYTES: Final = 4096
"""Largest TLS record sent. Each connection keeps a buffer of one: with gRPC's 16 KiB a peer takes 8 kB more,
of 125, and weights take as much CPU, within the noise of a fifth."""

_LEAST_MESSAGE_BYTES: Final = 16 << 20
"""Room for any message but a group: a learner's hello with 65 536 held groups and some step records."""

_CLOSING_S: Final = 1.0
"""How long connections may take their last bytes after every rpc has ended."""

_GRPC_LOG: Final = logging.getLogger("grpc._cython.cygrpc")


class Audience(enum.Enum):
    """The callers a port is for."""

    MEMBERS = enum.auto()
    """Callers show a certificate of the run, or the handshake fails."""
    STRANGERS = enum.auto()
    """Callers have no certificate yet; only the server shows one."""


class Gate(Protocol):
    """Takes connections in and passes them on to a server that listens on a private socket."""

    def open(self, listen: str, inner: PrivateSocket) -> AbstractAsyncContextManager[str]:
        """Pass connections on while the body runs; yield the address with its port.

        Raises OSError: the address cannot be bound.
        """
        ...


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of a port. The defaults serve thousands of peers; tests and strangers' ports take less."""

    rpc: RpcLimits = field(default_factory=RpcLimits)
    recheck_s: float = 5.0
    """Interval between two checks of expiry and revocation of callers with live streams."""
    concurrent_rpcs: int = 65_536
    calls_per_connection: int = 100
    """At once; a client keeps further ones to itself until some have ended."""
    handshake_s: float = 10.0
    """A connection that has not finished its TLS handshake by then is closed."""
    gate: GateLimits | None = None
    """Bounds on connections to a port for strangers; None: what the limit of open files allows."""
    keepalive: Keepalive = KEEPALIVE
    """Must be the same as the clients': a server disconnects clients that ping too often."""


class RpcServer:
    """Serves some services on one port. Its ``address`` is known once it is ready."""

    def __init__(
        self,
        name: str,
        *,
        listen: str,
        servicers: Sequence[Callable[[grpc.aio.Server], None]],
        identity: Identity | OwnIdentity | None,
        admission: Admission,
        drain_grace_s: float,
        audience: Audience = Audience.MEMBERS,
        limits: ServerLimits | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Serve as ``identity``, of a coordinator or relay; None: without TLS, on loopback only.

        ``gate`` takes connections in; None: of members gRPC does, with strangers a gate of ours.
        """
        self._name = name
        self._listen = listen
        self._servicers = servicers
        self._identity = identity
        self._audience = audience
        self._drain_grace_s = drain_grace_s
        self._limits = limits or ServerLimits()
        self._count_refusal = admission.count_refusal
        if gate is None and audience is Audience.STRANGERS:
            gate = StrangersGate(self._count_refusal, self._limits.gate)
        self._gate = gate
        self._interceptor = RpcInterceptor(name, admission, limits=self._limits.rpc)
        self.address = listen
        """host:port, the real port once ready."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def live_rpcs(self) -> int:
        """Rpcs being served now."""
        return len(self._interceptor.live)

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Serve until ``stopping``, then drain. Raises StartupError: it may not or cannot listen there."""
        _GRPC_LOG.addFilter(_is_of_interest)
        server = grpc.aio.server(
            interceptors=(self._interceptor,),
            options=self._options(),
            maximum_concurrent_rpcs=self._limits.concurrent_rpcs,
        )
        for add_servicer in self._servicers:
            add_servicer(server)
        async with self._listening(server) as self.address:
            logger.info(
                "serving",
                extra={"service": self._name, "address": self.address, "tls": self._identity is not None},
            )
            ready()
            await asyncio.gather(self._recheck_until(stopping), self._guard_until(stopping))
            await self._interceptor.live.drain(self._drain_grace_s)

    @contextlib.asynccontextmanager
    async def _listening(self, server: grpc.aio.Server) -> AsyncIterator[str]:
        """Serve while the body runs; yield the address with the real port."""
        host = self._host()
        credentials = self._credentials(host)
        async with contextlib.AsyncExitStack() as at_the_end:
            try:
                if self._gate is not None:
                    inner = at_the_end.enter_context(private_socket())
                    _add_port(server, inner.grpc_address, credentials)
                    address = await at_the_end.enter_async_context(self._gate.open(self._listen, inner))
                else:
                    address = join_address(host, _add_port(server, self._listen, credentials))
            except (OSError, RuntimeError) as error:
                fix = "Another process listens there, or the address is not this machine's: choose another."
                why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
                raise StartupError(f"{self._name} cannot listen on {self._listen}{why}", fix=fix) from error
            await server.start()
            at_the_end.push_async_callback(server.stop, _CLOSING_S)
            yield address

    async def _guard_until(self, stopping: asyncio.Event) -> None:
        if self._gate is None:
            port = split_address(self.address)[1]
            await ConnectionGuard(port, self._interceptor.live.owners, self._count_refusal).run(stopping)

    async def _recheck_until(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            await wait_at_most(stopping, self._limits.recheck_s)
            self._interceptor.live.recheck()

    def _host(self) -> str:
        try:
            return split_address(self._listen)[0]
        except ValueError as error:
            raise StartupError(f"{self._name} cannot listen: {error}", fix="Write host:port.") from error

    def _credentials(self, host: str) -> grpc.ServerCredentials | None:
        identity = self._identity
        if identity is None:
            if not is_loopback(host):
                raise StartupError(
                    f"TLS is off and {self._listen} is not loopback: anyone could join, read and publish",
                    fix="Set node.tls = true, or listen on 127.0.0.1.",
                )
            return None
        shown = identity.current

        def configuration() -> grpc.ServerCertificateConfiguration:
            ca_pem = shown.ca_pem if self._audience is Audience.MEMBERS else None
            return grpc.ssl_server_certificate_configuration([(shown.key_pem, shown.certificate_pem)], ca_pem)

        # None where nothing has changed, which the stubs do not know.
        def renewed() -> Any:
            """Return what the next handshakes use, if it is another; called in any thread."""
            nonlocal shown
            if shown is identity.current:
                return None
            shown = identity.current
            return configuration()

        return grpc.dynamic_ssl_server_credentials(
            configuration(),
            renewed,
            require_client_authentication=self._audience is Audience.MEMBERS,
        )

    def _options(self) -> list[tuple[str, Any]]:
        is_for_members = self._audience is Audience.MEMBERS
        return [
            # On by default: a second daemon would silently get half of the connections.
            ("grpc.so_reuseport", 0),
            ("grpc.tsi.max_frame_size", _RECORD_BYTES),
            ("grpc.server_handshake_timeout_ms", int(self._limits.handshake_s * 1000)),
            ("grpc.server.max_pending_requests", _PENDING_RPCS),
            ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING_RPCS),
            # A compressed message stays so and is refused as malformed: 61 KB would be 60 MB of zeros before
            # anyone asks who sent it. What is worth compressing was compressed before.
            ("grpc.per_message_decompression", 0),
            ("grpc.max_concurrent_streams", self._limits.calls_per_connection if is_for_members else 4),
            *self._limits.keepalive.server_options,
            # The largest of any rpc; the interceptor applies the limit of each.
            (
                "grpc.max_receive_message_length",
                max(_LEAST_MESSAGE_BYTES, self._limits.rpc.submission_bytes)
                if is_for_members
                else MESSAGE_BYTES["EnrolmentService"],
            ),
            ("grpc.max_send_message_length", ROLLOUT_MESSAGE_BYTES),
        ]


def _add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Whether a record of gRPC's tells of more than a caller that went while its answer was being sent.

    gRPC hears of the failed write and of the caller's end in either order, and logs a traceback, as an error,
    where the write comes first.
    """
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"  # which gRPC keeps in a private module
