"""Notifications to systemd: ready, stopping, alive. None are sent where NOTIFY_SOCKET is not set.

Each is one datagram to the socket named in NOTIFY_SOCKET; see sd_notify(3).
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final, Self

from node.process.daemon import Phase
from node.waits import wait_at_most

logger = logging.getLogger(__name__)

_MESSAGES: Final = {
    Phase.STANDBY: "READY=1\nSTATUS=standby",
    Phase.SERVING: "READY=1\nSTATUS=serving",
    Phase.DRAINING: "STOPPING=1",
}


class Systemd:
    """Notifies systemd of the daemon's phase and, as a service, feeds its watchdog."""

    name = "systemd watchdog"

    def __init__(self, *, address: str | None, watchdog_s: float | None) -> None:
        self._address = address
        self._watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read NOTIFY_SOCKET, and WATCHDOG_USEC where it is meant for this process (WATCHDOG_PID)."""
        address = environ.get("NOTIFY_SOCKET")
        microseconds = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_s = float(microseconds) / 1e6 if microseconds.isdecimal() and is_ours else None
        return cls(address=address, watchdog_s=watchdog_s or None)

    def announce(self, phase: Phase) -> None:
        """Send the daemon's phase."""
        if phase in _MESSAGES:
            self._send(_MESSAGES[phase])

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Send WATCHDOG=1 twice per watchdog period, from the event loop: a stalled loop is a dead daemon."""
        ready()
        while not stopping.is_set():
            await wait_at_most(stopping, self._watchdog_s and self._watchdog_s / 2)
            if not stopping.is_set():
                self._send("WATCHDOG=1")

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
