"""Room for so many bytes, shared by tasks: who waits for it goes in turn."""

import asyncio


class ByteRoom:
    """Used on one event loop's thread."""

    def __init__(self, size_bytes: int) -> None:
        """Begin empty; something larger than ``size_bytes`` has to itself what there is."""
        self._size_bytes = size_bytes
        self.used_bytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        """Wait for room, and take it until ``give_back``."""
        async with self._turn:
            while self.used_bytes and self.used_bytes + size_bytes > self._size_bytes:
                self._freed.clear()
                await self._freed.wait()
            self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self._freed.set()
