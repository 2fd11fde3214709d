"""Notifications to systemd: ready, stopping, alive, what it does. None where NOTIFY_SOCKET is not set.

Each is one datagram to the socket named in NOTIFY_SOCKET; see sd_notify(3).
"""

import asyncio
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Self

from prometheus_client import CollectorRegistry

from node.process.daemon import Phase
from node.system.waits import wait_at_most
from node.values.roles import ROLES, Role

logger = logging.getLogger(__name__)

STATUS_EVERY_S: Final = 5.0
"""How often ``systemctl status`` is told what the process does, where that has changed."""

_MESSAGES: Final = {
    Phase.STANDBY: "READY=1\nSTATUS=standby",
    Phase.SERVING: "READY=1\nSTATUS=serving",
    Phase.DRAINING: "STOPPING=1",
}


class Systemd:
    """Notifies systemd of the daemon's phase and, as a service, feeds its watchdog."""

    name = "systemd watchdog"

    def __init__(
        self, *, address: str | None, watchdog_s: float | None, status: Callable[[], str] = lambda: ""
    ) -> None:
        """Tell systemd what ``status`` returns, a few words for people, whenever that has changed."""
        self._address = address
        self._watchdog_s = watchdog_s
        self._status = status
        self._phase = Phase.STARTING
        self._said = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], status: Callable[[], str] = lambda: "") -> Self:
        """Read NOTIFY_SOCKET, and WATCHDOG_USEC where it is meant for this process (WATCHDOG_PID)."""
        address = environ.get("NOTIFY_SOCKET")
        microseconds = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_s = float(microseconds) / 1e6 if microseconds.isdecimal() and is_ours else None
        return cls(address=address, watchdog_s=watchdog_s or None, status=status)

    def announce(self, phase: Phase) -> None:
        """Send the daemon's phase."""
        self._phase = phase
        if phase in _MESSAGES:
            self._send(_MESSAGES[phase])

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Send WATCHDOG=1 twice per watchdog period, from the event loop: a stalled loop is a dead daemon."""
        ready()
        every_s = None if self._address is None else min(STATUS_EVERY_S, (self._watchdog_s or math.inf) / 2)
        while not stopping.is_set():
            await wait_at_most(stopping, every_s)
            if not stopping.is_set() and (lines := [*self._due()]):
                self._send("\n".join(lines))

    def _due(self) -> Iterator[str]:
        if self._watchdog_s is not None:
            yield "WATCHDOG=1"
        if (doing := self._status()) and (
            said := doing if self._phase is Phase.SERVING else f"{self._phase}; {doing}"
        ) != self._said:
            self._said = said
            yield f"STATUS={said}"

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        # A leading @ is the zero byte of an abstract socket.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
                connection.setblocking(False)  # a systemd that does not read must not stall the loop
                connection.sendto(message.encode(), address)
        except OSError as error:
            logger.warning("systemd cannot be notified", extra={"notification": message, "error": str(error)})


def status_line(registry: CollectorRegistry, roles: Sequence[Role], *, waits_for: str) -> str:
    """Return each role with its version, and what the process waits for."""
    having = ", ".join(_role(registry, role) for role in roles)
    return f"{having}; waits for {waits_for}" if waits_for else having


def _role(registry: CollectorRegistry, role: Role) -> str:
    # The registry's other metrics are not asked: a coordinator has the fleet's.
    found = registry.restricted_registry([gauge] if (gauge := ROLES[role].version_gauge) else []).collect()
    values = [sample.value for metric in found for sample in metric.samples]
    known = [value for value in values if math.isfinite(value) and value >= 0]
    return f"{role} at version {known[0]:.0f}" if known else str(role)
