"""How a peer calls the coordinator, whichever there is by the time the request arrives."""

from collections.abc import Awaitable, Callable
from typing import Any

from node.rpc.call_ends import ConnectionLost
from simulation.hub import Hub
from simulation.network import Network, call
from simulation.virtual_loop import Process


class HubCalls:
    """Calls of one life of a peer."""

    def __init__(self, process: Process, network: Network, hub: Callable[[], Hub | None]) -> None:
        self._process = process
        self._link = network.link(process.name, "coordinator")
        self._hub = hub

    async def __call__(self, handle: Callable[[Hub], Awaitable[Any]]) -> Any:
        """Return the answer to a request. Raises ConnectionLost, RefusedError."""

        def of_process() -> Process | None:
            hub = self._hub()
            return None if hub is None else hub.process

        async def handled() -> Any:
            hub = self._hub()
            if hub is None:
                raise ConnectionLost("the coordinator is down")
            return await handle(hub)

        return await call(self._process.loop, self._link, of_process, handled)
