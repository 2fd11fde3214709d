"""Whose clock is wrong when a certificate that is valid here is refused there; pure.

    hub refuses \\ this clock says    not yet valid     valid               expired
    as expired, with its own time     own clock         hub's clock         final: both agree
    at the handshake, without a word  own clock         hub's clock         final
    we refuse the hub's certificate   own clock         own clock           own clock

What is a matter of clocks is waited out: a clock can be set without anyone touching this peer.
"""

import datetime
import enum
from dataclasses import dataclass
from typing import Final

ENROL_AGAIN: Final = (
    "Make a token where the coordinator runs (`heterorl-node token DIR --role {role} --address HOST:PORT "
    "--out FILE`), set node.token_file to it, move the old identity directory away, and start again."
)

SET_THE_CLOCK: Final = "Set the clock that is wrong; nothing else needs to be done or restarted."


class Wait(enum.StrEnum):
    """What a peer waits for while clocks disagree; the ``for`` label of its waits."""

    HUB_CLOCK = "coordinator's clock"
    OWN_CLOCK = "this machine's clock"


@dataclass(frozen=True, slots=True)
class Window:
    """When a certificate is valid, Unix seconds: the start belongs to it, the end does not."""

    not_before_s: float
    not_after_s: float

    def __str__(self) -> str:
        return f"from {moment(self.not_before_s)} to {moment(self.not_after_s)}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a refusal says about the clocks."""

    waits_for: Wait | None
    """None: nothing to wait for; clocks agree, and the certificate has expired."""
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}. {self.fix}"


def refused_as_expired(own: Window, *, node_id: str, role: str, now: float, hub_now: float | None) -> Finding:
    """Judge a hub's refusal of this peer's certificate as expired.

    Args:
        own: of this peer's certificate.
        node_id: this peer's name.
        role: what it is, to enrol it again as.
        now: Unix seconds on this machine's clock.
        hub_now: Unix seconds on the hub's clock, where it said so.
    """
    clocks = f"this machine's clock says {moment(now)}"
    if hub_now is not None:
        clocks = f"the coordinator's clock says {moment(hub_now)}, {clocks}"
    certificate = f"the certificate of {node_id} is valid {own}"
    if now >= own.not_after_s:
        return Finding(
            None,
            f"the certificate of {node_id} expired at {moment(own.not_after_s)}: {clocks}",
            ENROL_AGAIN.format(role=role),
        )
    wait = Wait.OWN_CLOCK if now < own.not_before_s else Wait.HUB_CLOCK
    return Finding(wait, f"{clocks}, and {certificate}", SET_THE_CLOCK)


def refused_at_handshake(own: Window, *, node_id: str, role: str, now: float) -> Finding:
    """Judge a hub that proves itself and then closes the connection when it has seen this peer's certificate.

    The run's authority issued the certificate (``check_own``), so that only its dates can be the reason.
    """
    here = f"this machine's clock says {moment(now)}, and the certificate of {node_id} is valid {own}"
    if now >= own.not_after_s:
        return Finding(
            None, f"the coordinator refuses this certificate: {here}", ENROL_AGAIN.format(role=role)
        )
    if now < own.not_before_s:
        return Finding(Wait.OWN_CLOCK, f"the coordinator refuses this certificate: {here}", SET_THE_CLOCK)
    return Finding(
        Wait.HUB_CLOCK,
        f"the coordinator refuses a certificate that is valid here: {here}. "
        "The coordinator's clock is outside these dates",
        "Set the coordinator's clock; nothing needs to be restarted.",
    )


def hub_not_valid(hub: Window, *, now: float) -> Finding | None:
    """Return what is wrong if a hub's certificate is not valid by this machine's clock; None where it is."""
    here = f"this machine's clock says {moment(now)}, and the coordinator's certificate is valid {hub}"
    if now < hub.not_before_s:
        return Finding(Wait.OWN_CLOCK, here, "Set this machine's clock, if it is behind.")
    if now >= hub.not_after_s:
        return Finding(
            Wait.OWN_CLOCK,
            here,
            "Set this machine's clock, if it is ahead; else renew the hub's certificate.",
        )
    return None


def moment(unix_s: float) -> str:
    """Return Unix seconds as a date and time, UTC."""
    try:
        return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:g} s"
