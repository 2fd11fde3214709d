"""The protocol of a service: it starts, says when it is ready, and drains; and an order of stopping."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from node.system.waits import drop


class Service(Protocol):
    """A part of a role that runs for as long as the daemon does."""

    @property
    def name(self) -> str:
        """Name for logs."""
        ...

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Call ``ready`` once it can be relied upon; return when ``stopping`` is set and its work is done.

        Raises if it cannot go on.
        """
        ...


class StopsAfter:
    """A service that is asked to stop only after another of its role has returned, if that ever started."""

    def __init__(self, service: Service, *, other: "StopsAfter | None" = None) -> None:
        self.service = service
        self._other = other
        self._is_started = False
        self._returned = asyncio.Event()

    @property
    def name(self) -> str:
        return self.service.name

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Run the service; see ``Service``."""
        self._is_started = True
        its_turn = asyncio.Event()
        passing_on = asyncio.create_task(self._pass_on(stopping, its_turn))
        try:
            await self.service.run(ready=ready, stopping=its_turn)
        finally:
            drop(passing_on)
            self._returned.set()

    async def _pass_on(self, stopping: asyncio.Event, its_turn: asyncio.Event) -> None:
        await stopping.wait()
        if self._other is not None and self._other._is_started:
            await self._other._returned.wait()
        its_turn.set()
