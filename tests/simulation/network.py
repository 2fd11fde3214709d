"""The Internet between the peers of a run: delays, breaks, repeats, reordering, cuts; all from seeds.

    caller --request--> hub: a task of its process --answer--> caller
       |                 |
       '-- lost, cut, the hub is dead: ConnectionLost, after a while; the hub may have done it all the same

Requests of one peer overtake each other. What goes over one stream keeps its order, and ends with the stream.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from node.rpc.call_ends import ConnectionLost
from simulation.virtual_loop import Process, VirtualLoop

Answer = TypeVar("Answer")
Message = TypeVar("Message")

NOTICED_S = 6.0
"""Until a peer notices that nothing comes back, as keepalives would."""


@dataclass(slots=True)
class Condition:
    """How a peer's connections are at present."""

    cuts: int = 0
    loss: float = 0.0
    repeats: float = 0.0
    delay_factor: float = 1.0


@dataclass(slots=True)
class Network:
    """Every link goes between a peer and a hub; a link is as bad as the worse of the two."""

    loop: VirtualLoop
    seed: int
    conditions: dict[str, Condition] = field(default_factory=dict)
    _links: dict[str, "Link"] = field(default_factory=dict)

    def condition(self, name: str) -> Condition:
        return self.conditions.setdefault(name, Condition())

    def link(self, peer: str, hub: str) -> "Link":
        name = f"{self.seed}/{peer}-{hub}"
        link = self._links.get(name)
        if link is None:
            link = self._links[name] = Link(self.condition(peer), self.condition(hub), random.Random(name))
        return link


@dataclass(slots=True)
class Link:
    peer: Condition
    hub: Condition
    draw: random.Random

    @property
    def is_cut(self) -> bool:
        return bool(self.peer.cuts or self.hub.cuts)

    def delay_s(self) -> float:
        """Return the next one-way delay: as between two continents at most, with a long tail."""
        factor = max(self.peer.delay_factor, self.hub.delay_factor)
        return factor * (0.005 + 0.03 * self.draw.expovariate(1.0))

    def loses(self) -> bool:
        return self.draw.random() < max(self.peer.loss, self.hub.loss)

    def repeats(self) -> bool:
        return self.draw.random() < max(self.peer.repeats, self.hub.repeats)


async def call(
    loop: VirtualLoop,
    link: Link,
    process_of: Callable[[], Process | None],
    handle: Callable[[], Awaitable[Answer]],
    *,
    timeout_s: float = 15.0,
) -> Answer:
    """Carry a request to a hub; return its answer.

    Args:
        process_of: Returns the hub's process as the request arrives; None: it is down.
        handle: Runs in that process.
    Raises:
        ConnectionLost: nobody knows whether it was handled. RefusedError: the hub's answer.
    """
    answered: asyncio.Future[Answer] = loop.create_future()

    def fail(what: str) -> None:
        if not answered.done():
            answered.set_exception(ConnectionLost(what))

    def arrive() -> None:
        process = process_of()
        if link.is_cut or process is None or not process.is_alive:
            loop.call_later(NOTICED_S if link.is_cut else link.delay_s(), fail, "the hub cannot be reached")
            return
        task = process.spawn(_served(loop, link, process, handle, answered))
        answered.add_done_callback(lambda _: task.cancel() if answered.cancelled() else None)

    for _ in range(2 if link.repeats() else 1):
        if link.loses():
            loop.call_later(link.delay_s() * 20, fail, "the connection broke before the request was sent")
        else:
            loop.call_later(link.delay_s(), arrive)
    timer = loop.call_later(timeout_s, fail, f"no answer within {timeout_s:g} s")
    try:
        return await answered
    finally:
        timer.cancel()


async def _served(
    loop: VirtualLoop,
    link: Link,
    process: Process,
    handle: Callable[[], Awaitable[Answer]],
    answered: "asyncio.Future[Answer]",
) -> None:
    error: Exception | None = None
    answer: Any = None
    try:
        answer = await handle()
    except asyncio.CancelledError:
        if not answered.done():
            loop.call_later(link.delay_s(), _settle, answered, None, ConnectionLost("the hub went away"))
        raise
    except Exception as refused:
        error = refused
    if not process.is_alive:
        return
    if link.is_cut or link.loses():
        error = ConnectionLost("the connection broke before the answer came")
        loop.call_later(NOTICED_S, _settle, answered, None, error)
    else:
        loop.call_later(link.delay_s(), _settle, answered, answer, error)


def _settle(future: "asyncio.Future[Any]", answer: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)


class Stream(Generic[Message]):
    """One direction of a stream: messages in their order, until it ends."""

    def __init__(self, loop: VirtualLoop, link: Link) -> None:
        self._loop = loop
        self._link = link
        self._arrived: deque[Message] = deque()
        self._arrives_s = 0.0
        self._end: Exception | None = None
        self._is_ended = False
        self._is_broken = False
        """Whether a message was lost: none that follows arrives, and the end is noticed later."""
        self._wake = asyncio.Event()

    def send(self, message: Message) -> None:
        """Send; a break on the way ends the stream, and neither side knows what of it arrived."""
        if self._is_ended or self._is_broken:
            return
        if self._link.is_cut:
            self._is_broken = True
            self._loop.call_later(NOTICED_S, self.end, ConnectionLost("the stream was cut"))
            return
        if self._link.loses():
            self.end(ConnectionLost("the stream broke"))
            return
        now = self._loop.time()
        self._arrives_s = max(self._arrives_s + 1e-6, now + self._link.delay_s())
        self._loop.call_later(self._arrives_s - now, self._arrive, message)

    def end(self, error: Exception | None = None) -> None:
        """End it for the reader, at once."""
        if not self._is_ended:
            self._is_ended, self._end = True, error
            self._wake.set()

    async def next(self) -> Message | None:
        """Return the next message; None at its end. Raises what ended it."""
        while not self._arrived:
            if self._is_ended:
                if self._end is not None:
                    raise self._end
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._arrived.popleft()

    def _arrive(self, message: Message) -> None:
        if self._link.is_cut:
            self.end(ConnectionLost("the stream was cut"))
        elif not self._is_ended:
            self._arrived.append(message)
            self._wake.set()
