"""The server interceptor: every rpc of every service passes here before its servicer.

    headers -> who -> may they -> how often -> first message -> size -> parse -> servicer -> answer
                 \\________\\___________\\______________\\________\\________\\_____\\-> refusal:
                                                             status, text, reason, counter

A servicer raises RefusedError to refuse. Anything else it raises is our fault: it is logged with an id, and
the caller is sent that id only. TLS checks a certificate once per connection; the interceptor checks expiry
and revocation once per rpc and, for streams, whenever ``recheck`` is called.
"""

import asyncio
import contextlib
import inspect
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from node.clock import Clock, moment
from node.errors import CountRefusal, Reason, Recovery, RefusedError
from node.identity.own_identity import RenewedCertificates
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.limits import ROLLOUT_MESSAGE_BYTES
from node.rpc.address import ENROLMENT_PORT, MEMBERS_PORT
from node.rpc.auth import (
    GONE,
    RULES,
    Context,
    Rule,
    certificate_of,
    check_role,
    not_after_of,
    peer_of,
    service_of,
)
from node.rpc.call_rates import CallRates, Rate
from node.rpc.channel import HUB_CLOCK_KEY, REASON_KEY
from node.rpc.connection_guard import Owners
from node.rpc.messages import bounded_parser, first_message_s, only_request, requests, within

# Quoted: generic in the type stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

logger = logging.getLogger(__name__)

_DETAILS_CHARACTERS: Final = 1000
"""Longest text sent with a refusal: trailing metadata beyond 8 KiB is dropped whole by gRPC."""

_WARNINGS: Final = Rate(per_s=1 / 60, burst=1)
"""How often the log warns of one peer, or of all strangers together."""


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Bounds on the rpcs of one caller."""

    rpcs_per_peer: int = 64
    """At once. Twice what a sampler needs that fetches over eight connections."""
    first_message_s: float = float("inf")
    """Longest a caller may take to send its first message; ``messages.first_message_s`` holds as well."""
    unary_s: float = 120.0
    """Longest a unary rpc may take once it has its request, whatever its caller's deadline."""
    stall_s: float = 60.0
    """Longest a finite stream may wait for its next message, in either direction."""
    submission_bytes: int = ROLLOUT_MESSAGE_BYTES
    """Largest SubmitRollouts request: of a run's largest group, where the hub knows it when it starts."""
    refusal_s: float = 2.0
    """Longest a refusal may take to be sent: to a caller that has stopped reading it never is."""
    impatient_s: float = 1.0
    """Time that a call over its peer's rate or number waits for its refusal: a peer that tries again at once
    would cost as much as one that is served."""
    held_back: int = 1024
    """Calls of all peers that wait so, at 20 KB each; further ones are refused at once."""


@dataclass(slots=True, eq=False)
class LiveRpc:
    """An rpc that was admitted and has not ended."""

    method: str
    rule: Rule
    peer: Peer | None
    """None where the rpc asks for no certificate."""
    certificate_pem: bytes
    """The one that the connection was made with; empty where TLS is off or none is asked for."""
    not_after_s: float
    """When that expires, Unix seconds."""
    task: asyncio.Task[None]
    ended_by: RefusedError | None = None
    """Why the server ended it; None while it has not."""
    is_writing: bool = False
    """Whether a message to its caller is on its way."""

    @property
    def account(self) -> tuple[str, str]:
        """The account that pays for it: its caller, or all strangers, and its method."""
        return "" if self.peer is None else self.peer.node_id, self.method

    def end(self, refusal: RefusedError, *, patience_s: float) -> None:
        """End it with a refusal.

        A message that is being sent gets a little time: gRPC fails to send a status meanwhile, and the caller
        would wait for its own deadline.
        """
        self.ended_by = refusal
        if self.is_writing:
            self.task.get_loop().call_later(patience_s, self._cut)
        else:
            self.task.cancel()

    def end_stalled(self, limit_s: float) -> None:
        """End it, whose caller takes no message for so long."""
        if self.ended_by is None:
            what = f"reading the answer took more than {limit_s:g} s"
            self.ended_by = RefusedError(Reason.BUSY, what, fix="try again")
            self.task.cancel()

    def _cut(self) -> None:
        if self.is_writing:
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class Admission:
    """Run, revocations, clock and counter by which the ports of a hub admit rpcs."""

    run_id: str
    revocations: RevocationList
    clock: Clock
    count_refusal: CountRefusal
    standby: Callable[[], RefusedError] | None = None
    """Returns the refusal of every call, at a hub that serves nothing yet; None: it serves."""
    renewed: RenewedCertificates = field(default_factory=RenewedCertificates)
    """Callers' certificates that were made anew since they connected."""


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Admits rpcs, bounds them, refuses them, and ends them when the server drains."""

    def __init__(self, name: str, admission: Admission, *, limits: RpcLimits) -> None:
        self._name = name
        self._admission = admission
        self._clock = admission.clock
        self._limits = limits
        self._is_draining = False
        self._rates = CallRates()
        self._held_back = 0
        self._live: set[LiveRpc] = set()
        self._live_of: Counter[str] = Counter()
        """Node id -> its live rpcs."""
        self._handlers: dict[str, Handler] = {}
        """Method -> its servicer's handler, with all checks before it."""
        self.owners = Owners()
        """Members by the connections they call over."""

    @property
    def live_rpcs(self) -> int:
        """Rpcs being served now."""
        return len(self._live)

    def recheck(self) -> None:
        """End the streams of callers whose certificate has expired or was revoked since they began."""
        revoked = self._admission.revocations.everyone()

        def refusal_of(rpc: LiveRpc) -> RefusedError | None:
            if rpc.peer is None:
                return None
            is_revoked = rpc.peer.node_id in revoked
            return self._standing_refusal(
                rpc.peer, rpc.certificate_pem, rpc.not_after_s, is_revoked=is_revoked
            )

        self._end_each(refusal_of)

    async def drain(self, grace_s: float) -> None:
        """Admit no more rpcs, end the endless ones, and end the others after ``grace_s``."""
        self._is_draining = True
        self._end_each(lambda rpc: _draining() if rpc.rule.is_endless else None)
        if self._live:
            await asyncio.wait([rpc.task for rpc in self._live], timeout=grace_s)
        if self._live:
            methods = sorted({rpc.method for rpc in self._live})
            logger.warning("rpcs late to drain", extra={"methods": methods})
            self._end_each(lambda _: _draining())

    def _end_each(self, refusal_of: Callable[[LiveRpc], RefusedError | None]) -> None:
        """Cancel the servicers of rpcs for which there is a refusal, which their callers are sent."""
        for rpc in self._live:
            if rpc.ended_by is None and (refusal := refusal_of(rpc)) is not None:
                rpc.end(refusal, patience_s=self._limits.refusal_s)

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
                wait_s=None if rule.message_rate is None else partial(self._pace, rpc, rule.message_rate),
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
                        self._charge_refused_messages(rpc, rule.refusals(response))
                        await self._write(rpc, context, response)

        called = "stream" if handler.request_streaming else "unary"
        answered = "stream" if handler.response_streaming else "unary"
        behaviour: Any = getattr(handler, f"{called}_{answered}")
        serialize: Any = handler.response_serializer
        make: Any = getattr(grpc, f"stream_{answered}_rpc_method_handler")
        guarded: Handler = make(
            respond_many if handler.response_streaming else respond,
            request_deserializer=bounded_parser(
                method, handler.request_deserializer, submission_bytes=self._limits.submission_bytes
            ),
            response_serializer=serialize if handler.response_streaming else None,
        )
        return guarded

    def _pace(self, rpc: LiveRpc, rate: Rate) -> float:
        """Return how long a message has to wait by the rate; gRPC's flow control holds up its sender."""
        return self._rates.reserve((rpc.account, "message"), rate, now=self._clock.monotonic())

    def _charge_refused_messages(self, rpc: LiveRpc, refused: int) -> None:
        for _ in range(refused):
            rate = rpc.rule.message_rate or rpc.rule.rate
            self._rates.charge_refusal((rpc.account, "message"), rate, now=self._clock.monotonic())

    def _charge_refusal(self, rpc: LiveRpc) -> None:
        self._rates.charge_refusal(rpc.account, rpc.rule.rate, now=self._clock.monotonic())

    async def _write(self, rpc: LiveRpc, context: Context, response: Any) -> None:
        """Write one message, within ``stall_s``. Without a task: a large fleet is sent thousands a second."""
        stall_s = self._limits.stall_s
        rpc.is_writing = True
        limit = rpc.task.get_loop().call_later(stall_s, rpc.end_stalled, stall_s)
        try:
            await context.write(response)
        finally:
            limit.cancel()
            rpc.is_writing = False
        if rpc.ended_by is not None:
            raise asyncio.CancelledError

    @contextlib.asynccontextmanager
    async def _served(self, method: str, rule: Rule, context: Context) -> AsyncIterator[LiveRpc]:
        """Admit an rpc for the time of the body; send its caller a refusal if the body fails."""
        rpc: LiveRpc | None = None
        try:
            try:
                rpc = self._admit(method, rule, context)
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
                self._forget(rpc)

    def _admit(self, method: str, rule: Rule, context: Context) -> LiveRpc:
        peer, certificate_pem, not_after_s = None, b"", float("inf")
        if rule.roles is not None:
            peer, certificate_pem = peer_of(context), certificate_of(context)
            not_after_s = not_after_of(certificate_pem)
            if peer.run_id != (run_id := self._admission.run_id):
                what = f"this is run {run_id}, not {peer.run_id}"
                raise RefusedError(Reason.FOREIGN_RUN, what, fix="check the address")
            is_revoked = self._admission.revocations.is_revoked(peer.node_id)
            refusal = self._standing_refusal(peer, certificate_pem, not_after_s, is_revoked=is_revoked)
            if refusal is not None:
                raise refusal
            check_role(peer, rule, method)
            self.owners.note(context.peer(), peer)
            self._check_not_too_much(peer, method, rule.rate)
        if self._is_draining:
            raise _draining()
        task = asyncio.current_task()
        assert task is not None
        rpc = LiveRpc(method, rule, peer, certificate_pem, not_after_s, task)
        self._live.add(rpc)
        self._live_of[rpc.account[0]] += 1
        return rpc

    def _forget(self, rpc: LiveRpc) -> None:
        self._live.remove(rpc)
        node_id = rpc.account[0]
        self._live_of[node_id] -= 1
        if not self._live_of[node_id]:
            del self._live_of[node_id]

    def _check_not_too_much(self, peer: Peer, method: str, rate: Rate) -> None:
        most = self._limits.rpcs_per_peer
        if self._live_of[peer.node_id] >= most:
            raise RefusedError(
                Reason.BUSY, f"{peer.node_id} has {most} calls open already", fix="end some first"
            )
        wait_s = self._rates.take((peer.node_id, method), rate, now=self._clock.monotonic())
        if wait_s:
            raise RefusedError(
                Reason.TOO_OFTEN,
                f"{peer.node_id} calls {method} too often: {rate.per_s:g} times a second are allowed, "
                f"a refused call counts as {1 + rate.refused:g}",
                fix=f"try again in {wait_s:.1f} s",
            )

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

    def _standing_refusal(
        self, peer: Peer, certificate_pem: bytes, not_after_s: float, *, is_revoked: bool
    ) -> RefusedError | None:
        """Return why a peer whose certificate ends at ``not_after_s`` is shut out; None: it is not."""
        now = self._clock.now()
        if now >= not_after_s and now >= self._admission.renewed.not_after_s(certificate_pem):
            return RefusedError(
                Reason.EXPIRED,
                f"the certificate of {peer.node_id} expired at {moment(not_after_s)}, "
                f"and this hub's clock says {moment(now)}",
                fix="set the clock that is wrong, or enrol again",
            )
        if is_revoked:
            return RefusedError(
                Reason.REVOKED, f"{peer.node_id} was revoked", fix="ask the operator of the run"
            )
        return None

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
    members = f"the coordinator's members port (coordinator.listen, {MEMBERS_PORT} by default)"
    return f"{members} and at relays" if service == "PolicyService" else members


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
