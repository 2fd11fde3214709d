"""Uploads what the learner published to its hub: newest first, each frame once.

    hub announces, or the learner published -> plan_upload(local, remote) -> offer -> missing frames -> upload
            ^                                                                                        |
            `---------------- link cut, hub restarted, frame damaged there: after a backoff ---------'

What the hub has is known by its announcements alone. A frame that is damaged on the hub's disk takes its
artifact out of the next announcement, so it is planned again, and the answer to the offer names that frame.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Final

import grpc.aio

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.errors import Reason, Recovery, RefusedError
from node.rpc.call_ends import ConnectionLost, call, classified
from node.system.backoff import Backoff
from node.system.waits import side_by_side
from node.telemetry.transfer_metrics import TransferMetrics
from node.values import limits
from node.values.policy import Announcement, Artifact, ArtifactKey
from node.weights.planning.cheapest_chain import plan_upload
from node.weights.store.artifact_store import ArtifactStore
from node.weights.store.offers import takeable
from node.weights.transfer.sources import watch_versions
from node.wire.mapping import to_wire

logger = logging.getLogger(__name__)

ARTIFACTS_PER_ROUND: Final = 16
"""Offered together, at most. What is published meanwhile changes the next round's plan."""

OFFER_TIMEOUT_S: Final = 60.0
STALL_S: Final = 20.0


@dataclass(eq=False)
class ArtifactUploader:
    """A service of the learner. It listens to the store and to the hub."""

    store: ArtifactStore
    _: KW_ONLY
    control: grpc.aio.Channel
    bulk: Sequence[grpc.aio.Channel]
    """At least one; frames are spread over them."""
    metrics: TransferMetrics
    random: Callable[[], float]
    name: ClassVar = "policy upload"
    _remote: tuple[Artifact, ...] = field(default=(), init=False)
    _sent: set[ArtifactKey] = field(default_factory=set, init=False)
    """Uploaded since the last announcement, which does not name them yet."""
    _refused: set[ArtifactKey] = field(default_factory=set, init=False)
    """Older versions the hub refused. If it refuses the newest, the learner ends."""

    def __post_init__(self) -> None:
        self._stubs = [policy_pb2_grpc.PolicyServiceStub(channel) for channel in self.bulk]
        self._changed = asyncio.Event()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Upload until ``stopping``. What is left then is on disk for the next start.

        Raises RefusedError: the hub takes nothing from this learner any more, such as FENCED: a newer one
        took over; ROLLBACK: another policy has the number of its newest.
        """
        loop = asyncio.get_running_loop()
        with self.store.listening(lambda: loop.call_soon_threadsafe(self._changed.set)):
            async with side_by_side() as group:
                tasks = [group.create_task(self._watch()), group.create_task(self._supply())]
                ready()
                await stopping.wait()
                for task in tasks:
                    task.cancel()

    async def _watch(self) -> None:
        async for announcement in watch_versions(self.control, random=self.random):
            self._remote = announcement.artifacts
            self._sent.clear()
            self._changed.set()

    async def _supply(self) -> None:
        backoff = Backoff(self.random)
        while True:
            self._changed.clear()
            local = self.store.announcement()
            wanted = () if local is None else self._wanted(local)
            if local is None or not wanted:
                await self._changed.wait()
                continue
            try:
                await self._upload_all(wanted, local)
                backoff.reset()
            except (ConnectionLost, RefusedError) as error:
                if isinstance(error, RefusedError) and error.reason.recovery is Recovery.STOP:
                    raise
                logger.info("an upload was cut", extra={"error": str(error), "retries": backoff.retries})
                await backoff.wait()

    def _wanted(self, local: Announcement) -> tuple[Artifact, ...]:
        offerable = [artifact for artifact in local.artifacts if artifact.key not in self._refused]
        sent = [artifact for artifact in local.artifacts if artifact.key in self._sent]
        there = (*self._remote, *sent)
        plan = plan_upload(offerable, remote=there, head=local.head.number)
        # A hub that lost its disk still knows its head, and refuses what is older and does not lead there.
        taken = takeable(
            (artifact.key for artifact in plan),
            retained=(artifact.key for artifact in there),
            newest=local.head.number,
        )
        return tuple(artifact for artifact in plan if artifact.key in taken)[:ARTIFACTS_PER_ROUND]

    async def _upload_all(self, wanted: Sequence[Artifact], local: Announcement) -> None:
        # Offered from the newest: each manifest vouches for the root of its base, so that a hub
        # which lost its disk but not its head takes the older ones too.
        newest_first = sorted((artifact.key for artifact in wanted), reverse=True)
        missing = {key: await self._offer(key, local) for key in newest_first}
        for artifact in wanted:
            frames = missing[artifact.key]
            if frames:
                await self._upload(artifact.key, frames)
            self._sent.add(artifact.key)
            if self.store.announcement() != local:
                return

    async def _offer(self, key: ArtifactKey, local: Announcement) -> tuple[int, ...]:
        manifest = await asyncio.to_thread(self.store.manifest, key)
        request = policy_pb2.OfferArtifactRequest(signed_manifest=manifest.signed)
        try:
            answer = await call(self._stubs[0].OfferArtifact, request, timeout_s=OFFER_TIMEOUT_S)
        except RefusedError as error:
            if error.reason is not Reason.ROLLBACK or key.version == local.head.number:
                raise
            logger.warning(
                "the hub does not take an older version", extra={"version": key.version, "error": str(error)}
            )
            self._refused.add(key)
            return ()
        return tuple(answer.missing_frames)

    async def _upload(self, key: ArtifactKey, frames: Sequence[int]) -> None:
        with self.store.lease(key):
            async with side_by_side() as group:
                for number, stub in enumerate(self._stubs):
                    if share := frames[number :: len(self._stubs)]:
                        group.create_task(self._send(stub, key, share))
        logger.info(
            "uploaded",
            extra={"version": key.version, "base_version": key.base_version, "frames": len(frames)},
        )

    async def _send(
        self, stub: "policy_pb2_grpc.PolicyServiceAsyncStub", key: ArtifactKey, frames: Sequence[int]
    ) -> None:
        stream = stub.UploadFrames()
        wire_key = to_wire(policy_pb2.ArtifactKey, key)
        try:
            with classified():
                for frame in frames:
                    payload = await asyncio.to_thread(self.store.read_payload, key, frame)
                    for offset in range(0, len(payload), limits.CHUNK_BYTES):
                        data = payload[offset : offset + limits.CHUNK_BYTES]
                        async with asyncio.timeout(STALL_S):
                            await stream.write(
                                policy_pb2.UploadFramesRequest(
                                    key=wire_key, frame=frame, offset_bytes=offset, data=data
                                )
                            )
                        self.metrics.count_sent(key, len(data))
                await stream.done_writing()
                async with asyncio.timeout(OFFER_TIMEOUT_S):
                    await stream
        except TimeoutError:
            raise ConnectionLost("the hub stopped reading") from None
        finally:
            stream.cancel()
