"""The rpcs that a hub serves now: who may make one, how many and how often, and what ends it.

    headers --> certificate, run, revocation, role, number, rate --> live --> over
                     '------ refused                                  '-- expired, revoked, draining: ended

TLS checks a certificate once per connection. Expiry and revocation are checked once per rpc and, for streams,
whenever ``recheck`` is called. So is whether a caller still reads: a timer for each message would cost more
than the message.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from node.errors import CountRefusal, Reason, RefusedError
from node.identity.own_identity import RenewedCertificates
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.rpc.calls.call_rates import CallRates, Rate
from node.rpc.calls.caller import Context, certificate_of, not_after_of, peer_of
from node.rpc.calls.rpc_rules import Rule, check_role
from node.rpc.strangers.connection_guard import Owners
from node.system.clock import Clock, moment
from node.values.limits import ROLLOUT_MESSAGE_BYTES

logger = logging.getLogger(__name__)


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
    """Longest a finite stream may wait for its next message, and any caller may take to read one; the second
    is looked at with each ``recheck``."""
    submission_bytes: int = ROLLOUT_MESSAGE_BYTES
    """Largest SubmitRollouts request: of a run's largest group, where the hub knows it when it starts, or of
    several small ones."""
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
    writing_since_s: float | None = None
    """When the message to its caller began that is on its way, monotonic; None: none is."""

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
        if self.writing_since_s is not None:
            self.task.get_loop().call_later(patience_s, self._cut)
        else:
            self.task.cancel()

    def _cut(self) -> None:
        if self.writing_since_s is not None:
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


class LiveRpcs:
    """The rpcs that are being served: each was admitted, and can be ended."""

    def __init__(self, admission: Admission, *, limits: RpcLimits, rates: CallRates) -> None:
        self._admission = admission
        self._clock = admission.clock
        self._limits = limits
        self._rates = rates
        self._is_draining = False
        self._live: set[LiveRpc] = set()
        self._live_of: Counter[str] = Counter()
        """Node id -> its live rpcs."""
        self.owners = Owners()
        """Members by the connections they call over."""

    def __len__(self) -> int:
        return len(self._live)

    def admit(self, method: str, rule: Rule, context: Context) -> LiveRpc:
        """Admit the current task's rpc; ``forget`` must follow.

        Raises:
            RefusedError: its caller may not make it, or not now.
        """
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

    def forget(self, rpc: LiveRpc) -> None:
        """Note that an rpc has ended."""
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

    def recheck(self) -> None:
        """End the streams of callers whose certificate has expired or was revoked since they began, and those
        whose callers have taken no message for too long."""
        revoked = self._admission.revocations.everyone()
        began_s = self._clock.monotonic() - self._limits.stall_s
        for rpc in self._live:
            if rpc.ended_by is None and rpc.writing_since_s is not None and rpc.writing_since_s <= began_s:
                rpc.end(_stalled(self._limits.stall_s), patience_s=0.0)

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


def _stalled(limit_s: float) -> RefusedError:
    return RefusedError(Reason.BUSY, f"reading the answer took more than {limit_s:g} s", fix="try again")


def _draining() -> RefusedError:
    return RefusedError(Reason.DRAINING, "the hub is stopping", fix="connect again later")
