"""The one way into a servicer: every rpc of every service passes here.

    request bytes -> size -> parse -> who -> may they -> servicer -> answer
                       \\________\\______\\______\\____________\\__-> refusal: status, text, reason, counter

A servicer raises RefusedError to refuse; anything else it raises is our fault, is logged with an
id, and the caller is told that id only. TLS looks at a certificate once per connection, so the
gate looks at expiry and revocation once per rpc and, for streams, whenever ``recheck`` is called.
"""

import asyncio
import collections
import contextlib
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import grpc
import grpc.aio

from node.clock import Clock
from node.errors import STATUS_OF_REASON, Reason, RefusedError
from node.identity.clock_skew import moment
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.rpc.address import ENROLMENT_PORT, MEMBERS_PORT
from node.rpc.auth import RULES, Context, Rule, check_role, not_after_of, peer_of, service_of
from node.rpc.channel import HUB_CLOCK_KEY, REASON_KEY
from node.rpc.messages import bounded_parser, parsed, requests, within

# Quoted: generic in the type stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

logger = logging.getLogger(__name__)

_DETAILS_CHARACTERS: Final = 1000
"""Longest text sent with a refusal: trailing metadata beyond 8 KiB is dropped whole by gRPC."""


_MEMBERS_PORT: Final = f"the coordinator's members port (coordinator.listen, {MEMBERS_PORT} by default)"

_WHERE: Final = {
    "EnrolmentService": "the coordinator's enrolment port "
    f"(coordinator.enrolment_listen, {ENROLMENT_PORT} by default)",
    "MembershipService": _MEMBERS_PORT,
    "PolicyService": f"{_MEMBERS_PORT} and at relays",
    "RolloutService": f"{_MEMBERS_PORT} and at relays",
}
"""Service -> the port that serves it."""


class CountRefusal(Protocol):
    """Counts a refusal under its reason."""

    def __call__(self, *, service: str, reason: Reason) -> None: ...


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Bounds on what one caller may hold open."""

    streams_per_peer: int = 64
    """A sampler that fetches over eight connections, twice over."""
    unary_s: float = 120.0
    """Longest a unary rpc may take, whatever deadline its caller set."""
    stall_s: float = 60.0
    """Longest a finite stream may go without a message in the direction that is waited for."""
    farewell_s: float = 2.0
    """Longest a refusal may take to leave: behind a reader that has stopped it never does."""


@dataclass(slots=True, eq=False)
class _LiveRpc:
    method: str
    rule: Rule
    is_stream: bool
    peer: Peer | None
    not_after_s: float
    task: asyncio.Task[Any]
    cut: RefusedError | None = field(default=None)

    def end(self, refusal: RefusedError) -> None:
        """Stop the servicer; the caller is told ``refusal``."""
        if self.cut is None:
            self.cut = refusal
            self.task.cancel()


class Gate(grpc.aio.ServerInterceptor):
    """Admits, counts, bounds and, when told to, ends rpcs."""

    def __init__(
        self,
        *,
        name: str,
        run_id: str,
        revocations: RevocationList,
        clock: Clock,
        count_refusal: CountRefusal,
        limits: RpcLimits,
    ) -> None:
        self._name = name
        self._run_id = run_id
        self._revocations = revocations
        self._clock = clock
        self._count_refusal = count_refusal
        self._limits = limits
        self._live: set[_LiveRpc] = set()
        self._streams: collections.Counter[str] = collections.Counter()
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live_rpcs(self) -> int:
        """Rpcs being served now."""
        return len(self._live)

    def recheck(self) -> None:
        """End the streams of callers whose certificate has expired or was revoked since they began."""
        for rpc in tuple(self._live):
            try:
                self._check_standing(rpc.peer, rpc.not_after_s)
            except RefusedError as refusal:
                rpc.end(refusal)

    async def drain(self, grace_s: float) -> None:
        """Let no rpc in, end the endless ones, and give the others ``grace_s`` to finish."""
        self._is_draining = True
        self._end_all(is_endless=True)
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning(
                "rpcs late to drain", extra={"methods": sorted({rpc.method for rpc in self._live})}
            )
            self._end_all(is_endless=False)

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Put the gate before a servicer's method."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        rule = RULES.get(method)
        if rule is None:
            return None
        if handler is None:
            return self._misdirected(method)
        return self._guarded(handler, method, rule)

    def _misdirected(self, method: str) -> Handler:
        """Return a handler that says at which port an rpc is served that is not served at this one."""
        service = service_of(method)
        refusal = RefusedError(
            Reason.WRONG_PORT,
            f"this is the {self._name} port of run {self._run_id}",
            fix=f"{service} is at {_WHERE[service]}",
        )

        async def refuse(_: AsyncIterator[Any], context: Context) -> None:
            await self._refuse(context, method, refusal)

        # To the line, a unary call is a stream of one message: this kind answers them all.
        handler: Handler = grpc.stream_stream_rpc_method_handler(refuse)
        return handler

    def _guarded(self, handler: Handler, method: str, rule: Rule) -> Handler:
        is_stream = bool(handler.request_streaming or handler.response_streaming)
        stall_s = None if rule.is_endless else self._limits.stall_s

        def taken(request: Any) -> Any:
            return requests(request, stall_s) if handler.request_streaming else parsed(request)

        async def respond(request: Any, context: Context) -> Any:
            # A stream of requests may last; each of its messages has the stall limit instead.
            limit_s = None if is_stream else self._limits.unary_s
            async with self._served(method, rule, context, is_stream=is_stream), within(limit_s, method):
                # Serialised here: what a serialiser raises would be shown to the caller by gRPC.
                return serialize(await behaviour(taken(request), context))

        async def respond_many(request: Any, context: Context) -> None:
            async with self._served(method, rule, context, is_stream=is_stream):
                if not inspect.isasyncgenfunction(behaviour):
                    await behaviour(taken(request), context)
                    return
                async with contextlib.aclosing(behaviour(taken(request), context)) as responses:
                    async for response in responses:
                        async with within(self._limits.stall_s, "reading the answer"):
                            await self._write(context, response)

        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        behaviour: Any = getattr(handler, kind)
        serialize: Any = handler.response_serializer
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        guarded: Handler = make(
            respond_many if handler.response_streaming else respond,
            request_deserializer=bounded_parser(method, handler.request_deserializer),
            response_serializer=serialize if handler.response_streaming else None,
        )
        return guarded

    async def _write(self, context: Context, response: Any) -> None:
        """Write one message; when cancelled, wait for it to leave, so that a refusal can follow it.

        gRPC takes no status while a message is on its way: it would fail, and leave the caller to wait
        for its own deadline.
        """
        writing = asyncio.ensure_future(context.write(response))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing], timeout=self._limits.farewell_s)
            writing.cancel()
            raise

    @contextlib.asynccontextmanager
    async def _served(
        self, method: str, rule: Rule, context: Context, *, is_stream: bool
    ) -> AsyncIterator[None]:
        """Admit an rpc for the time of the body; say goodbye to its caller if the body fails."""
        rpc: _LiveRpc | None = None
        with contextlib.ExitStack() as at_the_end:
            try:
                rpc = self._admit(method, rule, context, is_stream=is_stream)
                at_the_end.callback(self._forget, rpc)
                yield
                return
            except asyncio.CancelledError:
                if rpc is None or rpc.cut is None:
                    raise
                rpc.task.uncancel()
                refusal = rpc.cut
            except RefusedError as error:
                refusal = error
            except grpc.aio.BaseError:
                raise
            except Exception as error:
                refusal = _only_refusal(error) or _internal_error(error, method)
            await self._refuse(context, method, refusal)

    def _admit(self, method: str, rule: Rule, context: Context, *, is_stream: bool) -> _LiveRpc:
        peer, not_after_s = None, float("inf")
        if rule.roles is not None:
            peer, not_after_s = peer_of(context), not_after_of(context)
            if peer.run_id != self._run_id:
                raise RefusedError(
                    Reason.FOREIGN_RUN,
                    f"this is run {self._run_id}, not {peer.run_id}",
                    fix="check the address",
                )
            self._check_standing(peer, not_after_s)
            check_role(peer, rule, method)
            if is_stream and self._streams[peer.node_id] >= self._limits.streams_per_peer:
                raise RefusedError(
                    Reason.BUSY, f"{peer.node_id} has {self._limits.streams_per_peer} streams open already"
                )
        if self._is_draining:
            raise RefusedError(Reason.DRAINING, "the hub is stopping", fix="connect again later")
        task = asyncio.current_task()
        assert task is not None
        rpc = _LiveRpc(method, rule, is_stream, peer, not_after_s, task)
        self._live.add(rpc)
        self._idle.clear()
        if is_stream and peer is not None:
            self._streams[peer.node_id] += 1
        return rpc

    def _forget(self, rpc: _LiveRpc) -> None:
        self._live.remove(rpc)
        if not self._live:
            self._idle.set()
        if rpc.is_stream and rpc.peer is not None:
            self._streams[rpc.peer.node_id] -= 1
            if not self._streams[rpc.peer.node_id]:
                del self._streams[rpc.peer.node_id]

    def _check_standing(self, peer: Peer | None, not_after_s: float) -> None:
        if peer is None:
            return
        now = self._clock.now()
        if now >= not_after_s:
            raise RefusedError(
                Reason.EXPIRED,
                f"the certificate of {peer.node_id} expired at {moment(not_after_s)}, "
                f"and this hub's clock says {moment(now)}",
                fix="set the clock that is wrong, or enrol again",
            )
        if self._revocations.is_revoked(peer.node_id):
            raise RefusedError(
                Reason.UNAUTHENTICATED, f"{peer.node_id} was revoked", fix="ask the operator of the run"
            )

    def _end_all(self, *, is_endless: bool) -> None:
        for rpc in tuple(self._live):
            if rpc.rule.is_endless == is_endless:
                rpc.end(RefusedError(Reason.DRAINING, "the hub is stopping", fix="connect again later"))

    async def _refuse(self, context: Context, method: str, refusal: RefusedError) -> None:
        self._count_refusal(service=service_of(method), reason=refusal.reason)
        logger.debug(
            "rpc refused",
            extra={
                "method": method,
                "reason": refusal.reason,
                "detail": str(refusal),
                "peer": context.peer(),
            },
        )
        status = grpc.StatusCode[STATUS_OF_REASON[refusal.reason]]
        try:
            async with asyncio.timeout(self._limits.farewell_s):
                await context.abort(
                    status,
                    str(refusal)[:_DETAILS_CHARACTERS],
                    ((REASON_KEY, refusal.reason.value), (HUB_CLOCK_KEY, f"{self._clock.now():.3f}")),
                )
        except TimeoutError:
            # Nobody reads: end as cancelled, which drops the call without a word.
            raise asyncio.CancelledError from None


def _only_refusal(error: Exception) -> RefusedError | None:
    """Give the refusal in the group that a TaskGroup makes of it, if there is nothing worse beside it."""
    while isinstance(error, ExceptionGroup):
        refused, other = error.split(RefusedError)
        if refused is None or other is not None:
            return None
        error = refused.exceptions[0]
    return error if isinstance(error, RefusedError) else None


def _internal_error(error: Exception, method: str) -> RefusedError:
    error_id = secrets.token_hex(4)
    logger.error("rpc failed", exc_info=error, extra={"method": method, "error_id": error_id})
    return RefusedError(Reason.INTERNAL, f"internal error {error_id}", fix="the hub's log has it")
