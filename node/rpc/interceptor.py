"""The server interceptor: every rpc of every service passes here before its servicer.

    request bytes -> size -> parse -> who -> may they -> servicer -> answer
                       \\________\\______\\______\\____________\\__-> refusal: status, text, reason, counter

A servicer raises RefusedError to refuse. Anything else it raises is our fault: it is logged with an id, and
the caller is sent that id only. TLS checks a certificate once per connection; the interceptor checks expiry
and revocation once per rpc and, for streams, whenever ``recheck`` is called.
"""

import asyncio
import contextlib
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from node.clock import Clock
from node.errors import CountRefusal, Reason, RefusedError
from node.identity.clock_skew import moment
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.limits import ROLLOUT_MESSAGE_BYTES
from node.rpc.address import ENROLMENT_PORT, MEMBERS_PORT
from node.rpc.auth import RULES, Context, Rule, check_role, not_after_of, peer_of, service_of
from node.rpc.channel import HUB_CLOCK_KEY, REASON_KEY
from node.rpc.live_rpcs import LiveRpc, LiveRpcs
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


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Bounds on the rpcs of one caller."""

    streams_per_peer: int = 64
    """Twice what a sampler needs that fetches over eight connections."""
    unary_s: float = 120.0
    """Longest a unary rpc may take, whatever its caller's deadline."""
    stall_s: float = 60.0
    """Longest a finite stream may wait for its next message, in either direction."""
    submission_bytes: int = ROLLOUT_MESSAGE_BYTES
    """Largest SubmitRollouts request: of a run's largest group, where the hub knows it when it starts."""
    refusal_s: float = 2.0
    """Longest a refusal may take to be sent: to a caller that has stopped reading it never is."""


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Admits rpcs, bounds them, refuses them, and ends them when the server drains."""

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
        self._is_draining = False
        self.live = LiveRpcs()
        """Rpcs being served now."""

    def recheck(self) -> None:
        """End the streams of callers whose certificate has expired or was revoked since they began."""
        self.live.end_each(
            lambda rpc: None if rpc.peer is None else self._standing_refusal(rpc.peer, rpc.not_after_s)
        )

    async def drain(self, grace_s: float) -> None:
        """Admit no more rpcs, end the endless ones, and end the others after ``grace_s``."""
        self._is_draining = True
        self.live.end_each(lambda rpc: _draining() if rpc.rule.is_endless else None)
        try:
            async with asyncio.timeout(grace_s):
                await self.live.wait_until_none()
        except TimeoutError:
            logger.warning("rpcs late to drain", extra={"methods": self.live.methods})
            self.live.end_each(lambda _: _draining())

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Return the handler of a servicer's method with all checks before it; None for an unknown method."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        rule = RULES.get(method)
        if rule is None:
            return None
        if handler is None:
            return self._misdirected(method)
        return self._guarded(handler, method, rule)

    def _misdirected(self, method: str) -> Handler:
        """Return a handler that refuses an rpc of another port, and says which port serves it."""
        service = service_of(method)
        refusal = RefusedError(
            Reason.WRONG_PORT,
            f"this is the {self._name} port of run {self._run_id}",
            fix=f"{service} is at {_WHERE[service]}",
        )

        async def refuse(_: AsyncIterator[Any], context: Context) -> None:
            await self._refuse(context, method, refusal)

        # On the wire a unary call is a stream of one message: this kind of handler answers both.
        handler: Handler = grpc.stream_stream_rpc_method_handler(refuse)
        return handler

    def _guarded(self, handler: Handler, method: str, rule: Rule) -> Handler:
        is_stream = bool(handler.request_streaming or handler.response_streaming)
        stall_s = None if rule.is_endless else self._limits.stall_s

        def taken(request: Any) -> Any:
            return requests(request, stall_s) if handler.request_streaming else parsed(request)

        async def respond(request: Any, context: Context) -> Any:
            # A stream of requests has no limit as a whole; each of its messages has the stall limit.
            limit_s = None if is_stream else self._limits.unary_s
            async with self._served(method, rule, context, is_stream=is_stream), within(limit_s, method):
                # Serialised here: gRPC would show the caller what a serialiser raises.
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
            request_deserializer=bounded_parser(
                method, handler.request_deserializer, submission_bytes=self._limits.submission_bytes
            ),
            response_serializer=serialize if handler.response_streaming else None,
        )
        return guarded

    async def _write(self, context: Context, response: Any) -> None:
        """Write one message; when cancelled, wait until it is sent, so that a refusal can follow it.

        gRPC fails to send a status while a message is being sent, and the caller would wait for its own
        deadline.
        """
        writing = asyncio.ensure_future(context.write(response))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing], timeout=self._limits.refusal_s)
            writing.cancel()
            raise

    @contextlib.asynccontextmanager
    async def _served(
        self, method: str, rule: Rule, context: Context, *, is_stream: bool
    ) -> AsyncIterator[None]:
        """Admit an rpc for the time of the body; send its caller a refusal if the body fails."""
        rpc: LiveRpc | None = None
        with contextlib.ExitStack() as at_the_end:
            try:
                rpc = self._admit(method, rule, context, is_stream=is_stream)
                at_the_end.callback(self.live.remove, rpc)
                yield
                return
            except asyncio.CancelledError:
                if rpc is None or rpc.ended_by is None:
                    raise
                rpc.task.uncancel()
                refusal = rpc.ended_by
            except RefusedError as error:
                refusal = error
            except grpc.aio.BaseError:
                raise
            except Exception as error:
                refusal = _only_refusal(error) or _internal_error(error, method)
            await self._refuse(context, method, refusal)

    def _admit(self, method: str, rule: Rule, context: Context, *, is_stream: bool) -> LiveRpc:
        peer, not_after_s = None, float("inf")
        if rule.roles is not None:
            peer, not_after_s = peer_of(context), not_after_of(context)
            if peer.run_id != self._run_id:
                raise RefusedError(
                    Reason.FOREIGN_RUN,
                    f"this is run {self._run_id}, not {peer.run_id}",
                    fix="check the address",
                )
            refusal = self._standing_refusal(peer, not_after_s)
            if refusal is not None:
                raise refusal
            check_role(peer, rule, method)
            if is_stream and self.live.streams_of(peer) >= self._limits.streams_per_peer:
                raise RefusedError(
                    Reason.BUSY, f"{peer.node_id} has {self._limits.streams_per_peer} streams open already"
                )
        if self._is_draining:
            raise _draining()
        task = asyncio.current_task()
        assert task is not None
        rpc = LiveRpc(method, rule, is_stream, peer, not_after_s, task)
        self.live.add(rpc)
        return rpc

    def _standing_refusal(self, peer: Peer, not_after_s: float) -> RefusedError | None:
        """Return why a peer whose certificate ends at ``not_after_s`` is shut out; None: it is not."""
        now = self._clock.now()
        if now >= not_after_s:
            return RefusedError(
                Reason.EXPIRED,
                f"the certificate of {peer.node_id} expired at {moment(not_after_s)}, "
                f"and this hub's clock says {moment(now)}",
                fix="set the clock that is wrong, or enrol again",
            )
        if self._revocations.is_revoked(peer.node_id):
            return RefusedError(
                Reason.UNAUTHENTICATED, f"{peer.node_id} was revoked", fix="ask the operator of the run"
            )
        return None

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
        status = grpc.StatusCode[refusal.reason.status]
        try:
            async with asyncio.timeout(self._limits.refusal_s):
                await context.abort(
                    status,
                    str(refusal)[:_DETAILS_CHARACTERS],
                    ((REASON_KEY, refusal.reason.value), (HUB_CLOCK_KEY, f"{self._clock.now():.3f}")),
                )
        except TimeoutError:
            # The caller does not read: end as cancelled, which drops the call without an answer.
            raise asyncio.CancelledError from None


def _draining() -> RefusedError:
    return RefusedError(Reason.DRAINING, "the hub is stopping", fix="connect again later")


def _only_refusal(error: Exception) -> RefusedError | None:
    """Return the refusal that a TaskGroup has wrapped in a group; None if the group holds anything else."""
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
