"""What a role is made of: services that start in order, say when they are ready, and drain."""

import asyncio
from collections.abc import Callable
from typing import Protocol


class Service(Protocol):
    """Something that runs for as long as the daemon does.

    ``run`` calls ``ready()`` once it can be relied upon, returns when ``stopping`` is set
    and its work is finished, and raises if it cannot go on.
    """

    @property
    def name(self) -> str:
        """Name for logs and for the report of what is late to drain."""
        ...

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Serve until ``stopping``."""
        ...
