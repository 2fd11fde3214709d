"""A client's stream that lasts: opened again, with a hello, whenever it has ended.

    hello --> a writer sends what is owed whenever it is woken
              a reader takes what comes
    ended: by a refusal or a lost connection --pause--> the next stream

Pauses grow until a stream on which something was heard is lost. After a refusal they grow on, whatever was
heard before it: else one that is refused what it sends would come again at once, each time.

What is owed and what becomes of a message are its user's to say, on the event loop's thread.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import grpc.aio

from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost, classified
from node.system.backoff import Backoff
from node.system.waits import put_away

Request = TypeVar("Request")
Response = TypeVar("Response")

REASON_LIMIT_S: Final = 1.0
"""Longest wait for the end of a stream on which nothing can be written any more."""


@dataclass(eq=False, slots=True)
class LastingStream(Generic[Request, Response]):
    """Streams of one rpc, one after the other; nothing is dialled before ``run``."""

    rpc: Callable[[], Any]
    """Opens a stream."""
    hello: Callable[[], Request]
    """Returns the first message of a stream. Nothing sent on the one before is known to have arrived."""
    owed: Callable[[], Iterable[Request]]
    """Returns what to send now, and counts it as sent."""
    hear: Callable[[Response], None]
    refused: Callable[[RefusedError], AbstractContextManager[None]]
    """Raises a refusal that is final; else returns the context of the pause until the next stream."""
    lost: Callable[[ConnectionLost], None]
    backoff: Backoff
    _something_owed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _has_heard: bool = field(default=False, init=False)
    """Whether the other end said something on the newest stream."""

    def wake(self) -> None:
        """Send what is owed by now."""
        self._something_owed.set()

    async def run(self, *, stopping: asyncio.Event | None = None) -> None:
        """Send and receive until cancelled; ``stopping`` ends a pause that has begun.

        Raises what ``hear`` and ``refused`` raise, but ConnectionLost.
        """
        while True:
            pause: AbstractContextManager[None] = nullcontext()
            self._has_heard = False
            try:
                await self._one_stream()
            except RefusedError as refusal:
                pause, self._has_heard = self.refused(refusal), False
            except ConnectionLost as lost:
                self.lost(lost)
            if self._has_heard:
                self.backoff.reset()
            with pause:
                await self.backoff.wait(None if stopping is None or stopping.is_set() else stopping)

    async def _one_stream(self) -> None:
        call = self.rpc()
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            # Where the other end has ended the stream, both fail, and the reader knows why.
            await asyncio.wait({reader}, timeout=REASON_LIMIT_S)
            ended = [task for task in (reader, writer) if task.done()]
        finally:
            call.cancel()
            await put_away(reader, writer)
        with classified():
            for task in ended:
                task.result()

    async def _write(self, call: Any) -> None:
        await call.write(self.hello())
        while True:
            self._something_owed.clear()
            for message in self.owed():
                await call.write(message)
            await self._something_owed.wait()

    async def _read(self, call: Any) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            self._has_heard = True
            self.hear(response)
