"""Finds out whether a call failed because two clocks differ: from the refusal, or by a TLS handshake."""

from node.clock import Clock
from node.errors import Reason, RefusedError
from node.identity import clock_skew as clocks
from node.identity.clock_skew import Finding, Window
from node.identity.identity_store import Identity
from node.rpc.channel import ConnectionLost
from node.rpc.handshake import Outcome, shake_hands


def comparison_with(target: str, identity: Identity | None, *, clock: Clock) -> "ClockComparison | None":
    """Return a comparison with the hub at ``target``; None where TLS is off, so that nothing expires."""
    return None if identity is None else ClockComparison(target, identity, clock=clock)


class ClockComparison:
    """Compares this machine's clock with the clock of the hub at one address."""

    def __init__(self, target: str, identity: Identity, *, clock: Clock) -> None:
        """Compare for ``identity``, which the run's authority has issued."""
        self._target = target
        self._identity = identity
        self._clock = clock

    async def after(self, error: RefusedError | ConnectionLost) -> Finding | None:
        """Return what a failed call shows about the clocks; None if it failed for another reason.

        Takes up to ``handshake.TIMEOUT_S`` after a lost connection, and no time after a refusal.
        """
        identity, now = self._identity, self._clock.now()
        own = Window(identity.not_before_s, identity.not_after_s)
        who = {"node_id": identity.node_id, "role": str(identity.role)}
        if isinstance(error, RefusedError):
            if error.reason is not Reason.EXPIRED:
                return None
            return clocks.refused_as_expired(own, **who, now=now, hub_now=error.hub_now_s)
        shaken = await shake_hands(self._target, identity)
        if shaken.outcome is Outcome.REFUSED:
            return clocks.refused_at_handshake(own, **who, now=now)
        return None if shaken.hub is None else clocks.hub_not_valid(shaken.hub, now=now)
