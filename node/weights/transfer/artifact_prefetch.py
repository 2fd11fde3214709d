"""Asks a source what comes after the version held, before it exists or because there is something newer.

    ask -> wait for the learner -> manifest, verified -> its first frames are on their way
     ^          |
     `-- backoff: link cut, source draining

The source chooses when the question arrives, so that the answer is still there to be fetched however long the
line is. It decides nothing else: the receiver fetches by name what did not come or is not wanted.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost, classified
from node.system.backoff import Backoff
from node.system.waits import wait_at_most
from node.weights.format.manifest import Manifest
from node.weights.transfer.payload_order import pushed_frames
from node.weights.transfer.ranges import ChunkStream, Range
from node.weights.transfer.source_turns import Fault
from node.weights.transfer.sources import Sources

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 1.0
"""How long an announcement may arrive before the artifact, besides two round trips of the line: they are sent
together, on two connections, or this peer asks only now."""

Verify = Callable[[bytes], Awaitable[Manifest]]


class ArtifactPrefetch:
    """A request for the next artifact after a version, and its answer."""

    def __init__(
        self,
        held_version: int,
        *,
        artifact_cost_bytes: int,
        sources: Sources,
        verify: Verify,
        answered: Callable[[float], None],
        random: Callable[[], float],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Ask in a task of ``tasks``; ``answered`` takes the measured round trip of the link, seconds."""
        self.held_version = held_version
        self._artifact_cost_bytes = artifact_cost_bytes
        self._answered = answered
        self._sources = sources
        self._verify = verify
        self._random = random
        self._pushed: tuple[Manifest, Range] | None = None
        """The answer, and its first frames, perhaps none, which are on their way."""
        self._settled = asyncio.Event()
        self._task = tasks.create_task(self._ask_until_answered())

    @property
    def is_waiting(self) -> bool:
        return not self._settled.is_set()

    @property
    def is_spent(self) -> bool:
        """Return whether there is no answer, and none may still come."""
        return not self.is_waiting and self._pushed is None

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the artifact that comes; None: there is no answer, or its frames were taken."""
        return None if self._pushed is None else self._pushed[0]

    async def answer(self, *, round_trip_s: float) -> Manifest | None:
        """Return ``manifest`` once there is an answer; None: none comes in time."""
        await wait_at_most(self._settled, PATIENCE_S + 2 * round_trip_s)
        return self.manifest

    def take(self, manifest: Manifest) -> Range | None:
        """Return the range of frames that is on its way, once."""
        if self._pushed is None or self._pushed[0] != manifest:
            return None
        (_, span), self._pushed = self._pushed, None
        return span

    def cancel(self) -> None:
        self._task.cancel()
        if self._pushed is not None:
            self._pushed[1].cancel_stream()
            self._pushed = None

    async def _ask_until_answered(self) -> None:
        backoff = Backoff(self._random)
        try:
            while self._pushed is None:
                source, stub = self._sources.preferred()
                try:
                    self._pushed = await self._ask(source, stub)
                except ConnectionLost as lost:
                    logger.debug("prefetch interrupted", extra={"source": source, "error": str(lost)})
                except RefusedError as refused:
                    if not refused.reason.is_retryable:
                        if refused.reason is not Reason.INTERNAL:
                            fault = Fault.REFUSED if refused.is_remote else Fault.LIED
                            self._sources.fault(source, fault, str(refused))
                        return
                if self._pushed is None:
                    await backoff.wait()
        finally:
            self._settled.set()

    async def _ask(
        self, source: str, stub: "policy_pb2_grpc.PolicyServiceAsyncStub"
    ) -> tuple[Manifest, Range]:
        most_bytes = self._sources.push_bytes(source)
        request = policy_pb2.AwaitArtifactRequest(
            held_version=self.held_version,
            most_bytes=most_bytes,
            artifact_cost_bytes=self._artifact_cost_bytes,
        )
        asked_at_s = time.monotonic()
        stream: ChunkStream = stub.AwaitArtifact(request)
        try:
            with classified():
                message = await stream.read()
            if not isinstance(message, policy_pb2.AwaitArtifactResponse):
                raise ConnectionLost("the stream ended before the manifest")
            self._answered(max(0.0, time.monotonic() - asked_at_s - message.waited_s))
            manifest = await self._verify(message.signed_manifest)
        except BaseException:
            stream.cancel()
            raise
        frames = pushed_frames(manifest, most_bytes=most_bytes, artifact_cost_bytes=self._artifact_cost_bytes)
        return manifest, Range(deque(frames), source=source, stream=stream)
