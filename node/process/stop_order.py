"""An order of stopping within a role, whose services the daemon asks to stop all at once."""

import asyncio
from collections.abc import Callable

from node.process.service import Service


class StopsAfter:
    """A service that is asked to stop only after another one has returned, if that ever started."""

    def __init__(self, service: Service, *, other: "StopsAfter | None" = None) -> None:
        self.service = service
        self._other = other
        self._is_started = False
        self._returned = asyncio.Event()

    @property
    def name(self) -> str:
        return self.service.name

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Run the service; see ``node.process.service``."""
        self._is_started = True
        its_turn = asyncio.Event()
        passing_on = asyncio.create_task(self._pass_on(stopping, its_turn))
        try:
            await self.service.run(ready=ready, stopping=its_turn)
        finally:
            passing_on.cancel()
            self._returned.set()

    async def _pass_on(self, stopping: asyncio.Event, its_turn: asyncio.Event) -> None:
        await stopping.wait()
        if self._other is not None and self._other._is_started:
            await self._other._returned.wait()
        its_turn.set()
