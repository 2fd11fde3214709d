"""The protocol of a service: it starts, says when it is ready, and drains."""

import asyncio
from collections.abc import Callable
from typing import Protocol


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
