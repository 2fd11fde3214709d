"""What systemd is told: ready, stopping, still alive. Silent where no systemd listens.

The protocol is one datagram per message to the socket named in NOTIFY_SOCKET; see sd_notify(3).
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

_MESSAGES: Final = {Phase.SERVING: "READY=1", Phase.DRAINING: "STOPPING=1"}


class Systemd:
    """The line to systemd, and the service that keeps its watchdog quiet."""

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
        """Tell the daemon's phase."""
        if phase in _MESSAGES:
            self._send(_MESSAGES[phase])

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Say "alive" twice per watchdog period, from the event loop: a stalled loop is a dead daemon."""
        ready()
        while not stopping.is_set():
            await wait_at_most(stopping, self._watchdog_s and self._watchdog_s / 2)
            if not stopping.is_set():
                self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        # A leading @ stands for the zero byte of an abstract socket.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
                line.setblocking(False)  # a systemd that does not read must not stall the loop
                line.sendto(message.encode(), address)
        except OSError as error:
            logger.warning("systemd cannot be told", extra={"told": message, "error": str(error)})
