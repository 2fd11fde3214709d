"""Says whether a call failed because two clocks differ, from what is known without asking again; pure.

    by this clock, the peer's certificate is        not valid yet   valid          expired
    the hub refuses it as expired, with its time    own clock       hub's clock    final: both agree
    the hub closes the connection without a word    own clock       both are said  final
    the hub's own certificate is not valid here     own clock       own clock      own clock

A clock can be set without anyone touching this peer, so a wrong one is waited for.
"""

import enum
from dataclasses import dataclass
from typing import Final

from node.errors import Reason, RefusedError
from node.identity.identity_store import ENROL_AGAIN, Identity
from node.rpc.call_ends import ConnectionLost, TlsFailure
from node.system.clock import moment

_SET_THE_CLOCK: Final = "Set the clock that is wrong; nothing else needs to be done or restarted."


class AwaitedClock(enum.StrEnum):
    """Clocks a peer waits for while they disagree; the ``for`` label of its waits."""

    HUB_CLOCK = "coordinator's clock"
    OWN_CLOCK = "this machine's clock"


@dataclass(frozen=True, slots=True)
class ClockFinding:
    """Conclusion from a failed call about the clocks."""

    what: str
    fix: str
    waits_for: AwaitedClock | None = None
    """None: no clock is known to be wrong."""
    has_expired: bool = False
    """Both clocks agree that this peer's certificate has expired: nothing to wait for."""

    def __str__(self) -> str:
        return f"{self.what}. {self.fix}"


def compare_clocks(
    error: RefusedError | ConnectionLost, identity: Identity | None, *, now: float
) -> ClockFinding | None:
    """Return what a failed call of ``identity`` (None: TLS is off) says about the clocks; None: nothing."""
    if identity is None:
        return None
    clocks = f"this machine's clock says {moment(now)}"
    if isinstance(error, RefusedError):
        if error.reason is not Reason.EXPIRED:
            return None
        if error.hub_now_s is not None:
            clocks = f"the coordinator's clock says {moment(error.hub_now_s)}, {clocks}"
    elif error.tls is TlsFailure.HUB_DATES:
        return ClockFinding(
            f"{clocks}, and the coordinator's certificate is not valid by it",
            "Set this machine's clock, if it is wrong; else renew the hub's certificate.",
            AwaitedClock.OWN_CLOCK,
        )
    elif error.tls is not TlsFailure.CLOSED:
        return None
    dates = f"from {moment(identity.not_before_s)} to {moment(identity.not_after_s)}"
    if now >= identity.not_after_s:
        expired = f"the certificate of {identity.node_id} expired at {moment(identity.not_after_s)}: {clocks}"
        return ClockFinding(expired, ENROL_AGAIN.format(role=identity.role), has_expired=True)
    known = f"{clocks}, and the certificate of {identity.node_id} is valid {dates}"
    if now < identity.not_before_s:
        return ClockFinding(known, _SET_THE_CLOCK, AwaitedClock.OWN_CLOCK)
    if isinstance(error, RefusedError):
        return ClockFinding(known, _SET_THE_CLOCK, AwaitedClock.HUB_CLOCK)
    fix = "If this stays so, the coordinator's clock is outside these dates."
    return ClockFinding(f"{error}: {known}", fix)
