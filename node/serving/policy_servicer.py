"""PolicyService at a hub: announces, serves and takes in artifacts that the hub cannot forge.

At a relay an artifact may still be arriving: a frame of it is served as soon as it has arrived and is
verified."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.errors import Reason, RefusedError
from node.rpc.calls.caller import Context
from node.rpc.calls.messages import within
from node.telemetry.transfer_metrics import TransferMetrics
from node.values import limits
from node.values.policy import Announcement, ArtifactKey
from node.weights.format.manifest import Manifest
from node.weights.planning.cheapest_chain import plan_catch_up
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.bucket_mirror import BucketMirror
from node.weights.transfer.payload_order import first_batch, pushed_frames
from node.wire.mapping import from_wire, to_wire

ARRIVAL_TIMEOUT_S: Final = 15.0
"""Longest wait for a frame to arrive; then the caller is told to come back, before it takes us for dead."""

RESUME_TIMEOUT_S: Final = 5.0
"""Longest wait for the transfer of an incomplete artifact to resume, as at a relay that has just started.
After that its reader had better plan again: the relay may have left the artifact for a newer one."""


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """Translates between the wire and an ArtifactStore. The interceptor sends refusals to the caller."""

    def __init__(
        self,
        store: ArtifactStore,
        *,
        metrics: TransferMetrics,
        bucket: BucketMirror | None = None,
        batch_bytes: int = limits.BATCH_BYTES,
    ) -> None:
        """Serve ``store``, and addresses of what is in ``bucket``; join small payloads to ``batch_bytes``."""
        self._store = store
        self._bucket = bucket
        self._metrics = metrics
        self._batch_bytes = batch_bytes
        metrics.watch_lingering(lambda: store.lingering_artifacts)

    async def WatchVersions(  # noqa: N802 - the name is the rpc's
        self, request: policy_pb2.WatchVersionsRequest, context: Context
    ) -> AsyncIterator[policy_pb2.WatchVersionsResponse]:
        async with contextlib.aclosing(self._announcements()) as announcements:
            async for announcement in announcements:
                yield to_wire(policy_pb2.WatchVersionsResponse, announcement)

    async def GetManifest(  # noqa: N802
        self, request: policy_pb2.GetManifestRequest, context: Context
    ) -> policy_pb2.GetManifestResponse:
        key = from_wire(ArtifactKey, request.key)
        manifest = await asyncio.to_thread(self._store.manifest, key)
        with self._store.lease(manifest.key, lingers=True):
            return policy_pb2.GetManifestResponse(signed_manifest=manifest.signed)

    async def FetchFrames(  # noqa: N802
        self, request: policy_pb2.FetchFramesRequest, context: Context
    ) -> AsyncGenerator[policy_pb2.FetchFramesResponse, None]:
        key = from_wire(ArtifactKey, request.key)
        with self._store.lease(key, lingers=True):
            manifest = await asyncio.to_thread(self._store.manifest, key)
            _check_wanted(request, manifest)
            start, end = request.first_offset_bytes, request.end_offset_bytes or None
            async for frame, offset_bytes, data in self._chunks(
                manifest, request.frames, start_bytes=start, end_bytes=end, verifies=request.came_damaged
            ):
                yield policy_pb2.FetchFramesResponse(frame=frame, offset_bytes=offset_bytes, data=data)

    async def LocateArtifact(  # noqa: N802
        self, request: policy_pb2.LocateArtifactRequest, context: Context
    ) -> policy_pb2.LocateArtifactResponse:
        key = from_wire(ArtifactKey, request.key)
        if self._bucket is None:
            raise RefusedError(Reason.UNKNOWN_VERSION, "this hub has no bucket", fix="fetch from the hub")
        with self._store.lease(key, lingers=True):
            url, valid_s = await self._bucket.locate(key)
            return policy_pb2.LocateArtifactResponse(url=url, valid_s=valid_s)

    async def AwaitArtifact(  # noqa: N802
        self, request: policy_pb2.AwaitArtifactRequest, context: Context
    ) -> AsyncIterator[policy_pb2.AwaitArtifactResponse]:
        started_s, cost_bytes = time.monotonic(), request.artifact_cost_bytes
        key = await self._next_after(request.held_version, artifact_cost_bytes=cost_bytes)
        waited_s = time.monotonic() - started_s
        with self._store.lease(key):
            manifest = await asyncio.to_thread(self._store.manifest, key)
            yield policy_pb2.AwaitArtifactResponse(signed_manifest=manifest.signed, waited_s=waited_s)
            most_bytes = min(request.most_bytes, limits.PUSH_BYTES)
            frames = pushed_frames(manifest, most_bytes=most_bytes, artifact_cost_bytes=cost_bytes)
            pushed_bytes = sum(manifest.frames[frame].payload_bytes for frame in frames)
            with self._store.lease(key, lingers=pushed_bytes < manifest.size_bytes):
                async for frame, offset_bytes, data in self._chunks(manifest, frames):
                    yield policy_pb2.AwaitArtifactResponse(frame=frame, offset_bytes=offset_bytes, data=data)

    async def _next_after(self, held: int, *, artifact_cost_bytes: int) -> ArtifactKey:
        """Wait for a head newer than ``held``; return the first artifact on the cheapest way to it."""
        async with contextlib.aclosing(self._announcements()) as announcements:
            async for announcement in announcements:
                path = plan_catch_up(
                    held,
                    announcement.head.number,
                    announcement.artifacts,
                    artifact_cost_bytes=artifact_cost_bytes,
                )
                if path:
                    return path[0].key
        raise AssertionError("announcements do not end")

    async def _announcements(self) -> AsyncGenerator[Announcement, None]:
        """Yield the newest announcement, then each newer one; a slow reader skips some."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        sent = None
        with contextlib.ExitStack() as listening:
            listening.enter_context(self._store.listening(lambda: loop.call_soon_threadsafe(changed.set)))
            if self._bucket is not None:
                listening.enter_context(self._bucket.listening(changed.set))
            while True:
                changed.clear()
                announcement = self._store.announcement()
                if announcement is not None and self._bucket is not None:
                    announcement = self._bucket.announced(announcement)
                if announcement is not None and announcement != sent:
                    sent = announcement
                    yield announcement
                else:
                    await changed.wait()

    async def _chunks(
        self,
        manifest: Manifest,
        frames: Sequence[int],
        *,
        start_bytes: int = 0,
        end_bytes: int | None = None,
        verifies: bool = False,
    ) -> AsyncIterator[tuple[int, int, bytes]]:
        """Yield frame, offset, bytes; the first frame from ``start_bytes``, an only one to ``end_bytes``.

        ``verifies``: compare payloads with their digests first. Readers do it in any case.
        """
        key = manifest.key
        sent = 0
        while sent < len(frames):
            await self._wait_for(key, frames[sent])
            batch = first_batch(
                manifest,
                itertools.islice(frames, sent, None),
                most_bytes=self._batch_bytes,
                is_here=lambda frame: self._store.has(key, frame),
            )
            sent += len(batch)
            data = (await asyncio.to_thread(self.read, key, batch, verifies=verifies))[:end_bytes]
            for offset in range(start_bytes, len(data), limits.CHUNK_BYTES):
                chunk = data[offset : offset + limits.CHUNK_BYTES]
                # Before it is sent: a reader that has all it wants cancels, and nothing runs after the last.
                self._metrics.count_sent(key, len(chunk))
                yield batch[0], offset, chunk
            start_bytes = 0

    def read(self, key: ArtifactKey, frames: Sequence[int], *, verifies: bool) -> bytes:
        """Return the payloads of frames, one after the other."""
        payloads = [self._store.read_payload(key, frame, verifies=verifies) for frame in frames]
        return payloads[0] if len(payloads) == 1 else b"".join(payloads)

    async def _wait_for(self, key: ArtifactKey, frame: int) -> None:
        """Return when a frame is here, or is not arriving: then the store says what is missing."""
        if self._store.has(key, frame):
            return
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        with self._store.listening_to_frames(lambda: loop.call_soon_threadsafe(arrived.set)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESUME_TIMEOUT_S):
                    while not (self._store.has(key, frame) or self._store.is_awaited(key, frame)):
                        await arrived.wait()
                        arrived.clear()
            async with within(ARRIVAL_TIMEOUT_S, f"the arrival of frame {frame} of version {key.version}"):
                while self._store.is_awaited(key, frame):
                    await arrived.wait()
                    arrived.clear()

    async def OfferArtifact(  # noqa: N802
        self, request: policy_pb2.OfferArtifactRequest, context: Context
    ) -> policy_pb2.OfferArtifactResponse:
        _, missing = await asyncio.to_thread(self._store.offer_signed, request.signed_manifest)
        return policy_pb2.OfferArtifactResponse(missing_frames=missing)

    async def UploadFrames(  # noqa: N802
        self, request: AsyncIterator[policy_pb2.UploadFramesRequest], context: Context
    ) -> policy_pb2.UploadFramesResponse:
        upload: _Upload | None = None
        async for message in request:
            key = from_wire(ArtifactKey, message.key)
            if upload is None:
                manifest = await asyncio.to_thread(self._store.manifest, key)
                upload = _Upload(manifest)
            payload = upload.take(key, message.frame, message.offset_bytes, message.data)
            self._metrics.count_received(key, len(message.data))
            if payload is not None:
                await asyncio.to_thread(self._store.write_frame, key, message.frame, payload)
        if upload is None:
            raise RefusedError(Reason.MALFORMED, "the upload has no frame")
        missing = await asyncio.to_thread(self._store.missing, upload.manifest.key)
        return policy_pb2.UploadFramesResponse(missing_frames=missing)


@dataclass(slots=True)
class _Upload:
    """Joins the chunks of one stream, one frame at a time."""

    manifest: Manifest
    frame: int = -1
    partial: bytearray = field(default_factory=bytearray)

    def take(self, key: ArtifactKey, frame: int, offset_bytes: int, data: bytes) -> bytes | None:
        """Return the payload that this chunk completes; None: it is not complete yet.

        Raises RefusedError: MALFORMED; it is not the next chunk.
        """
        if key != self.manifest.key or frame >= len(self.manifest.frames):
            raise RefusedError(
                Reason.MALFORMED, f"frame {frame} of {key} in an upload of {self.manifest.key}"
            )
        if not self.partial:
            self.frame = frame
        size_bytes = self.manifest.frames[frame].payload_bytes
        size_ok = 1 <= len(data) <= min(limits.CHUNK_BYTES, size_bytes - len(self.partial))
        if frame != self.frame or offset_bytes != len(self.partial) or not size_ok:
            raise RefusedError(
                Reason.MALFORMED,
                f"{len(data)} bytes of frame {frame} at {offset_bytes}, "
                f"expected was frame {self.frame} at {len(self.partial)} of {size_bytes}",
            )
        self.partial += data
        if len(self.partial) < size_bytes:
            return None
        payload = bytes(self.partial)
        self.partial.clear()
        return payload


def _check_wanted(request: policy_pb2.FetchFramesRequest, manifest: Manifest) -> None:
    frames = request.frames
    if not 1 <= len(frames) <= limits.FRAMES_PER_FETCH or len(set(frames)) != len(frames):
        raise RefusedError(
            Reason.MALFORMED,
            f"a request for {len(frames)} frames, {len(set(frames))} of them distinct; allowed are "
            f"1 to {limits.FRAMES_PER_FETCH}, each once",
        )
    if max(frames) >= len(manifest.frames):
        raise RefusedError(
            Reason.MALFORMED,
            f"no frame {max(frames)} in version {manifest.version}, which has {len(manifest.frames)} frames",
        )
    size_bytes = manifest.frames[frames[0]].payload_bytes
    if request.first_offset_bytes >= max(size_bytes, 1):
        raise RefusedError(
            Reason.MALFORMED,
            f"no byte {request.first_offset_bytes} in frame {frames[0]}, which has {size_bytes} bytes",
        )
    end_bytes = request.end_offset_bytes
    if end_bytes and not (len(frames) == 1 and request.first_offset_bytes < end_bytes <= size_bytes):
        raise RefusedError(
            Reason.MALFORMED,
            f"bytes {request.first_offset_bytes} to {end_bytes} of {len(frames)} frames, "
            f"the first of {size_bytes} bytes",
        )
