"""The relay's stream to the coordinator, on which it speaks for its samplers.

    ask --unsent, bounded--> request, several a message --> coordinator --answer--> asked
    sessions --summary, when the one before is answered and it is time--> notices --> sessions

While the coordinator reads no more, requests gather here; when they are too many, samplers are told to wait.
When the stream ends, so do all sessions: samplers join again, and go on with the leases they have.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import grpc.aio

from heterorl.v1 import common_pb2, membership_pb2, relay_pb2, rollout_pb2
from node.errors import Reason, RefusedError
from node.limits import CARRIED_REQUESTS
from node.relay.metrics import RelayMetrics
from node.relay.sampler_sessions import MESSAGE_BYTES, Sessions
from node.rpc.channel import Backoff, ConnectionLost, classified
from node.waits import put_away, run_until
from node.wire.relayed import refusal_from_wire

logger = logging.getLogger(__name__)

UNSENT_REQUESTS: Final = 1024
"""Requests that wait to be written: one of each sampler behind a large relay."""

UNSENT_BYTES: Final = 64 << 20
"""The same requests together."""

REQUEST_BYTES: Final = 6 << 20
"""Largest request of a sampler. The coordinator ends a stream with a message of more than 8 MiB, and with it
the sessions of all samplers; a message is one request and up to ``MESSAGE_BYTES`` of others."""

ANSWER_TIMEOUT_S: Final = 20.0
"""Longest wait for the answer to a summary, as for one to a heartbeat."""

CONNECTED_WITHIN_S: Final = 5.0
"""How long a sampler's join waits for the stream: a coordinator that restarts is back by then, most times."""

FIRST_PAUSE_S: Final = 2.0
"""Between summaries, until the coordinator has said."""

CarriedStream = grpc.aio.StreamStreamCall[relay_pb2.CarryRequest, relay_pb2.CarryResponse]


class Carrier:
    """A service; opens one stream after another."""

    name = "carrier"

    def __init__(
        self,
        open_stream: Callable[[], Any],
        sessions: Sessions,
        *,
        metrics: RelayMetrics,
        monotonic: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        """Carry for ``sessions``; ``open_stream`` calls Carry."""
        self._open_stream = open_stream
        self._sessions = sessions
        self._metrics = metrics
        self._monotonic = monotonic
        self._backoff = Backoff(random)
        self._connected = asyncio.Event()
        self._wake = asyncio.Event()
        self._number = 0
        self._unsent: deque[tuple[int, relay_pb2.CarriedRequest]] = deque()
        self._unsent_bytes = 0
        self._asked: dict[int, asyncio.Future[relay_pb2.CarriedAnswer]] = {}
        self._summary = 0
        self._is_summary_answered = True
        self._summary_due_s = 0.0
        self.pause_s = FIRST_PAUSE_S
        """Mean time between two heartbeats of a sampler, as the coordinator says."""
        self.head: common_pb2.PolicyVersion | None = None
        """The newest announced version, by the last summary's answer."""

    async def connected(self) -> None:
        """Wait for the stream. Raises RefusedError: BUSY; it takes too long."""
        try:
            async with asyncio.timeout(CONNECTED_WITHIN_S):
                await self._connected.wait()
        except TimeoutError:
            raise _away() from None

    async def ask(
        self,
        session: int,
        *,
        join: membership_pb2.JoinRequest | None = None,
        lease: rollout_pb2.LeasePromptsRequest | None = None,
        release: rollout_pb2.ReleaseLeasesRequest | None = None,
    ) -> relay_pb2.CarriedAnswer:
        """Hand a sampler's request up; return the coordinator's answer.

        Raises RefusedError: the coordinator's refusal; OVER_LIMIT, the request is too large; BUSY, where the
        coordinator is away or too much waits for it.
        """
        request = relay_pb2.CarriedRequest(session=session, join=join, lease=lease, release=release)
        if (size_bytes := request.ByteSize()) > REQUEST_BYTES:
            what = f"a request of {size_bytes} bytes, a relay hands up at most {REQUEST_BYTES}"
            raise RefusedError(Reason.OVER_LIMIT, what)
        if not self._connected.is_set():
            raise _away()
        if len(self._unsent) >= UNSENT_REQUESTS or self._unsent_bytes + size_bytes > UNSENT_BYTES:
            what = f"{len(self._unsent)} requests of {self._unsent_bytes} bytes wait for the coordinator"
            raise RefusedError(Reason.BUSY, what, fix="try again later")
        self._number += 1
        request.number = self._number
        self._unsent_bytes += size_bytes
        asked: asyncio.Future[relay_pb2.CarriedAnswer] = asyncio.get_running_loop().create_future()
        self._asked[request.number] = asked
        self._unsent.append((size_bytes, request))
        self._wake.set()
        try:
            answer = await asked
        finally:
            self._asked.pop(request.number, None)
        if answer.HasField("refused"):
            raise refusal_from_wire(answer.refused)
        return answer

    def leave(self, session: int) -> None:
        """Tell the coordinator that a sampler leaves; nobody waits for the answer."""
        if self._connected.is_set() and len(self._unsent) < UNSENT_REQUESTS:
            self._number += 1
            leave = relay_pb2.CarriedLeave()
            self._asked[self._number] = asyncio.get_running_loop().create_future()
            request = relay_pb2.CarriedRequest(number=self._number, session=session, leave=leave)
            self._unsent.append((0, request))
            self._wake.set()

    def waiting(self) -> int:
        """Return how many requests have no answer yet."""
        return len(self._asked)

    def notice_disconnected(self) -> None:
        """Tell the coordinator soon which sessions have lost their streams."""
        self._wake.set()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Keep a stream open until ``stopping``."""
        ready()
        await run_until(stopping, self._keep())

    async def _keep(self) -> None:
        while True:
            try:
                await self._one_stream()
            except (ConnectionLost, RefusedError) as error:
                logger.warning("samplers are not carried", extra={"detail": str(error)})
            await self._backoff.wait()

    async def _one_stream(self) -> None:
        call = self._open_stream()
        self._summary, self._is_summary_answered, self._summary_due_s = 0, True, self._monotonic()
        tasks = {asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            with classified():
                for task in done:
                    task.result()
            raise ConnectionLost("the coordinator ended the stream")
        finally:
            call.cancel()
            await put_away(*tasks)
            self._lose()

    def _lose(self) -> None:
        self._connected.clear()
        self._sessions.clear()
        self._unsent.clear()
        self._unsent_bytes = 0
        asked, self._asked = self._asked, {}
        for one in asked.values():
            if not one.done():
                one.set_exception(_away())
                one.exception()  # looked at: that of a leave has nobody who waits for it

    async def _write(self, call: CarriedStream) -> None:
        while True:
            self._wake.clear()
            message, size_bytes = relay_pb2.CarryRequest(disconnected=self._sessions.take_disconnected()), 0
            while self._unsent and len(message.requests) < CARRIED_REQUESTS and size_bytes < MESSAGE_BYTES:
                request_bytes, request = self._unsent.popleft()
                self._unsent_bytes -= request_bytes
                if request.number in self._asked:  # else its caller has gone
                    message.requests.append(request)
                    size_bytes += request_bytes
            if message.requests or message.disconnected:
                await call.write(message)
            if self._is_summary_answered and self._monotonic() >= self._summary_due_s:
                self._summary += 1
                self._is_summary_answered = False
                self._sessions.forget_unheard(self._monotonic())
                for part in self._sessions.summary(self._summary):
                    await call.write(part)
            if self._unsent:
                continue
            wait_s = max(0.0, self._summary_due_s - self._monotonic()) if self._is_summary_answered else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _read(self, call: CarriedStream) -> None:
        while True:
            try:
                async with asyncio.timeout(self.pause_s + ANSWER_TIMEOUT_S):
                    response = await call.read()
            except TimeoutError:
                raise ConnectionLost(f"no answer to a summary within {ANSWER_TIMEOUT_S:g} s") from None
            if not isinstance(response, relay_pb2.CarryResponse):  # grpc.aio.EOF
                return
            self._take(response)

    def _take(self, response: relay_pb2.CarryResponse) -> None:
        for answer in response.answers:
            asked = self._asked.pop(answer.number, None)
            if asked is not None and not asked.done():
                asked.set_result(answer)
        for notice in response.notices:
            self._metrics.dropped_verdicts.inc(self._sessions.told(notice))
        if response.summary == self._summary and response.summary:
            self.head = response.head if response.HasField("head") else None
            self.pause_s = response.pause_s
            self._is_summary_answered = True
            self._summary_due_s = self._monotonic() + self.pause_s
            self._connected.set()
            self._backoff.reset()
            self._wake.set()


def _away() -> RefusedError:
    return RefusedError(
        Reason.BUSY, "the relay has no connection to the coordinator", fix="try again, or by another hub"
    )
