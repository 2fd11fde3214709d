"""Waiting for what has no event of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

WITHIN_S: Final = 100.0
"""Waited out only by a test that fails: enough for a busy machine, and less than pytest allows a test."""


async def until(is_so: Callable[[], bool], *, within_s: float = WITHIN_S) -> None:
    """Look again and again until ``is_so``; TimeoutError when it never is."""
    async with asyncio.timeout(within_s):
        while not is_so():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.005)


async def eventually(is_so: Callable[[], Awaitable[bool]], *, within_s: float = WITHIN_S) -> None:
    """Ask again and again until ``is_so``, with pauses in which the process that is asked can work."""
    async with asyncio.timeout(within_s):
        while not await is_so():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.05)  # half as often as a peer may ask for the status
