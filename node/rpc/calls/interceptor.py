"""The server interceptor: every rpc of every service passes here before its servicer.

    headers -> who -> may they -> how often -> first message -> size -> parse -> servicer -> answer
                 \\________\\___________\\______________\\________\\________\\_____\\-> refusal:
                                                             status, text, reason, counter

A servicer raises RefusedError to refuse. Anything else it raises is our fault: it is logged with an id, and
the caller is sent that id only. Who may call, how often and until when is decided in ``live_rpcs``.
"""

import asyncio
import contextlib
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from node.errors import Reason, Recovery, RefusedError
from node.identity.peer import Peer
from node.rpc.address import ENROLMENT_PORT, MEMBERS_PORT
from node.rpc.call_ends import HUB_CLOCK_KEY, REASON_KEY
from node.rpc.calls.call_rates import CallRates, Rate
from node.rpc.calls.caller import Context, peer_of
from node.rpc.calls.live_rpcs import Admission, LiveRpc, LiveRpcs, RpcLimits
from node.rpc.calls.messages import bounded_parser, first_message_s, only_request, requests, within
from node.rpc.calls.rpc_rules import GONE, RULES, Rule, service_of

# Quoted: generic in the type stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

logger = logging.getLogger(__name__)

_DETAILS_CHARACTERS: Final = 1000
"""Longest text sent with a refusal: trailing metadata beyond 8 KiB is dropped whole by gRPC."""

_WARNINGS: Final = Rate(per_s=1 / 60, burst=1)
"""How often the log warns of one peer, or of all strangers together."""


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Has rpcs admitted, bounds them, and sends their callers refusals."""

    def __init__(self, name: str, admission: Admission, *, limits: RpcLimits) -> None:
        self._name = name
        self._admission = admission
        self._clock = admission.clock
        self._limits = limits
        self._rates = CallRates()
        self._held_back = 0
        self._handlers: dict[str, Handler] = {}
        """Method -> its servicer's handler, with all checks before it."""
        self.live = LiveRpcs(admission, limits=limits, rates=self._rates)

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
            return self._refusing(method, GONE[method]) if method in GONE else None
        if self._admission.standby is not None:
            return self._refusing(method, self._admission.standby())
        if handler is None:
            return self._refusing(method, self._misdirected(method))
        guarded = self._handlers.get(method)
        if guarded is None:
            guarded = self._handlers[method] = self._guarded(handler, method, rule)
        return guarded

    def _misdirected(self, method: str) -> RefusedError:
        """Return the refusal of an rpc of another port, which says which port serves it."""
        service = service_of(method)
        return RefusedError(
            Reason.WRONG_PORT,
            f"this is the {self._name} port of run {self._admission.run_id}",
            fix=f"{service} is at {_port_of(service)}",
        )

    def _refusing(self, method: str, refusal: RefusedError) -> Handler:
        async def refuse(_: AsyncIterator[Any], context: Context) -> None:
            await self._refuse(context, method, refusal)

        # On the wire a unary call is a stream of one message: this kind of handler answers both.
        handler: Handler = grpc.stream_stream_rpc_method_handler(refuse)
        return handler

    def _guarded(self, handler: Handler, method: str, rule: Rule) -> Handler:
        # On the wire a unary call is a stream of one message. Taken as such it comes here before its message:
        # nothing of a caller that may not call is read, and one that sends nothing does not stay for ever.
        stall_s = None if rule.is_endless else self._limits.stall_s
        first_s = min(self._limits.first_message_s, first_message_s(method))

        def taken(messages: AsyncIterator[Any], rpc: LiveRpc) -> AsyncIterator[Any]:
            return requests(
                messages,
                first_s=first_s,
                stall_s=stall_s,
                yields_refusals=rule.is_answered_each,
                wait_s=self._pace(rpc),
            )

        async def respond(messages: AsyncIterator[Any], context: Context) -> Any:
            async with self._served(method, rule, context) as rpc:
                if handler.request_streaming:
                    # It has no limit as a whole; each of its messages has the stall limit.
                    response = await behaviour(taken(messages, rpc), context)
                else:
                    request = await only_request(messages, first_s=first_s)
                    async with within(self._limits.unary_s, method):
                        response = await behaviour(request, context)
                # Serialised here: gRPC would show the caller what a serialiser raises.
                return serialize(response)

        async def respond_many(messages: AsyncIterator[Any], context: Context) -> None:
            async with self._served(method, rule, context) as rpc:
                request: Any
                if handler.request_streaming:
                    request = taken(messages, rpc)
                else:
                    request = await only_request(messages, first_s=first_s)
                if not inspect.isasyncgenfunction(behaviour):
                    await behaviour(request, context)
                    return
                async with contextlib.aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        if refused := rule.refusals(response):
                            self._charge_refused_messages(rpc, refused)
                        await self._write(rpc, context, response)

        called = "stream" if handler.request_streaming else "unary"
        answered = "stream" if handler.response_streaming else "unary"
        behaviour: Any = getattr(handler, f"{called}_{answered}")
        serialize: Any = handler.response_serializer
        make: Any = getattr(grpc, f"stream_{answered}_rpc_method_handler")
        guarded: Handler = make(
            respond_many if handler.response_streaming else respond,
            request_deserializer=bounded_parser(
                method,
                handler.request_deserializer,
                submission_bytes=self._limits.submission_bytes,
                most_fields=rule.most_fields,
            ),
            response_serializer=serialize if handler.response_streaming else None,
        )
        return guarded

    def _pace(self, rpc: LiveRpc) -> Callable[[Any], float] | None:
        """Return a function that returns how long a message has to wait by its rate; None: it has none.

        gRPC's flow control holds up the sender meanwhile.
        """
        if (rate := rpc.rule.message_rate) is None:
            return None
        key, reserve, monotonic = (rpc.account, "message"), self._rates.reserve, self._clock.monotonic
        weight = rpc.rule.weight
        return lambda message: reserve(key, rate, now=monotonic(), tokens=weight(message))

    def _charge_refused_messages(self, rpc: LiveRpc, refused: int) -> None:
        for _ in range(refused):
            rate = rpc.rule.message_rate or rpc.rule.rate
            self._rates.charge_refusal((rpc.account, "message"), rate, now=self._clock.monotonic())

    def _charge_refusal(self, rpc: LiveRpc) -> None:
        self._rates.charge_refusal(rpc.account, rpc.rule.rate, now=self._clock.monotonic())

    async def _write(self, rpc: LiveRpc, context: Context, response: Any) -> None:
        """Write one message; ``LiveRpcs.recheck`` ends a call whose message nobody takes."""
        rpc.writing_since_s = self._clock.monotonic()
        try:
            await context.write(response)
        finally:
            rpc.writing_since_s = None
        if rpc.ended_by is not None:
            raise asyncio.CancelledError

    @contextlib.asynccontextmanager
    async def _served(self, method: str, rule: Rule, context: Context) -> AsyncIterator[LiveRpc]:
        """Admit an rpc for the time of the body; send its caller a refusal if the body fails."""
        rpc: LiveRpc | None = None
        try:
            try:
                rpc = self.live.admit(method, rule, context)
                yield rpc
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
            if rpc is None and refusal.reason in (Reason.BUSY, Reason.TOO_OFTEN):
                self._tell(peer_of(context), method, refusal)
                await self._hold_back()
            if rpc is not None and refusal.reason.recovery is not Recovery.WAIT:
                self._charge_refusal(rpc)
            await self._refuse(context, method, refusal)
        finally:
            if rpc is not None:
                self.live.forget(rpc)

    async def _hold_back(self) -> None:
        """Wait before a refusal, unless so many calls wait already that they would take memory."""
        if self._held_back < self._limits.held_back:
            self._held_back += 1
            try:
                await asyncio.sleep(self._limits.impatient_s)
            finally:
                self._held_back -= 1

    def _may_warn_of(self, node_id: str) -> bool:
        return self._rates.take((node_id, "warning"), _WARNINGS, now=self._clock.monotonic()) == 0

    def _tell(self, peer: Peer, method: str, refusal: RefusedError) -> None:
        if self._may_warn_of(peer.node_id):
            extra = {"peer": peer.node_id, "method": method, "reason": refusal.reason, "detail": str(refusal)}
            logger.warning("peer asks too much", extra=extra)

    async def _refuse(self, context: Context, method: str, refusal: RefusedError) -> None:
        self._admission.count_refusal(service=service_of(method), reason=refusal.reason)
        node_id = _name_of(context)
        extra = {
            "method": method, "reason": refusal.reason, "detail": str(refusal), "node_id": node_id,
            "peer": context.peer(),
        }  # fmt: skip
        # One that calls too often was named before it had to wait.
        is_told = refusal.reason.is_suspicious and refusal.reason is not Reason.TOO_OFTEN
        is_told = is_told and self._may_warn_of(node_id)
        logger.log(logging.WARNING if is_told else logging.DEBUG, "rpc refused", extra=extra)
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


def _name_of(context: Context) -> str:
    """Return the caller's name; empty for strangers, who share one."""
    try:
        return peer_of(context).node_id
    except RefusedError:
        return ""


def _port_of(service: str) -> str:
    if service == "EnrolmentService":
        return f"the coordinator's enrolment port (coordinator.enrolment_listen, {ENROLMENT_PORT} by default)"
    if service == "MergeService":
        return "the port that the learner serves contributors on (learner.merge.listen)"
    members = f"the coordinator's members port (coordinator.listen, {MEMBERS_PORT} by default)"
    return f"{members} and at relays" if service == "PolicyService" else members


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
