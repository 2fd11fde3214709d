"""One step of a chain: fetch an artifact, apply it to what is held, repair the frames that do not fit.

A caller walks the path of ``cheapest_chain.plan_catch_up``. Before the last step it lets its ``HighWater``
admit the manifest, and keeps the new mark.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from node.errors import Reason, RefusedError
from node.policy import NO_BASE, Artifact
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.assembly.apply import DamagedFrameError, WrongBaseError, check_payload, rebuild_frame
from node.weights.format.digests import Words, words_digest
from node.weights.format.layout import FrameSpan, Layout
from node.weights.format.manifest import Manifest
from node.weights.planning.cheapest_chain import plan, plan_fresh
from node.weights.transfer.fetcher import Fetcher

REPAIRED_FRAMES: Final = 64
"""Frames repaired one by one, at most. With more, what is held is not what it claims to be: begin again."""


class VersionInProgress(Protocol):
    """A version being put together, as ``sampler.versions.staging.StagedVersion``. Called in threads."""

    def take_held(self) -> tuple[int, ...]:
        """Use what the base has already; return the frames to be repaired."""
        ...

    def missing(self) -> tuple[int, ...]:
        """Return the frames whose payload is still needed."""
        ...

    def put(self, frame: int, payload: bytes) -> None:
        """Apply a payload. Raises DamagedFrameError or WrongBaseError."""
        ...

    def repair(self, frame: int, words: Words) -> None:
        """Set the words of a frame that was rebuilt otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class Remedy:
    """What frames are rebuilt from when the words held are wrong."""

    artifacts: Sequence[Artifact] = ()
    """As announced."""
    public_frame: Callable[[FrameSpan], Words] | None = None
    """Reads a frame of the public base model, in a thread; None: only keyframes help."""


async def fetch_into(
    stage: VersionInProgress,
    fetcher: Fetcher,
    manifest: Manifest,
    *,
    layout: Layout,
    remedy: Remedy,
    metrics: TransferMetrics,
) -> None:
    """Fetch the frames that ``stage`` lacks of the manifest's version, and repair those that do not fit.

    Raises:
        RefusedError: WRONG_BASE: too many frames have to be repaired, or there is nothing to repair them
            from; others as ``Fetcher.fetch``.
        ConnectionLost: as ``Fetcher.fetch``.
    """
    wrong = set(await asyncio.to_thread(stage.take_held))

    def put(frame: int, payload: bytes) -> None:
        started = time.perf_counter()
        try:
            stage.put(frame, payload)
        except WrongBaseError:
            wrong.add(frame)
        else:
            codec = manifest.frames[frame].codec.name.lower()
            metrics.count_applied_frame(codec, took_s=time.perf_counter() - started)

    started = time.perf_counter()
    await fetcher.fetch(manifest, [frame for frame in stage.missing() if frame not in wrong], put)
    metrics.count_fetch(manifest.key, took_s=time.perf_counter() - started)
    async for frame, words in rebuilt_frames(fetcher, sorted(wrong), manifest, layout=layout, remedy=remedy):
        await asyncio.to_thread(stage.repair, frame, words)
    metrics.count_repaired_frames(len(wrong))


async def rebuilt_frames(
    fetcher: Fetcher, frames: Sequence[int], manifest: Manifest, *, layout: Layout, remedy: Remedy
) -> AsyncIterator[tuple[int, Words]]:
    """Yield the words of frames of the manifest's version, rebuilt from payloads of these frames alone.

    Raises:
        RefusedError: WRONG_BASE: they are too many, or there is nothing to rebuild them from; others as
            ``Fetcher.fetch``.
        ConnectionLost: as ``Fetcher.fetch``.
    """
    if not frames:
        return
    path, public_frame = plan(NO_BASE, manifest.version, remedy.artifacts), None
    if path is None and remedy.public_frame is not None:
        path = plan_fresh(manifest.version, remedy.artifacts)
        public_frame = remedy.public_frame
    if path is None or len(frames) > REPAIRED_FRAMES:
        raise RefusedError(
            Reason.WRONG_BASE,
            f"{len(frames)} held frames are not what version {manifest.version} needs",
            fix="start from a keyframe or from the public base model",
        )
    manifests = [await fetcher.manifest(artifact.key) for artifact in path]
    for each in manifests:
        each.check_layout(layout)
    for frame in frames:
        steps = [(each, await _payload(fetcher, each, frame)) for each in manifests]
        start = None if public_frame is None else await asyncio.to_thread(public_frame, layout.frames[frame])
        words = await asyncio.to_thread(rebuild_frame, frame, steps, layout=layout, start=start)
        if not manifest.frames[frame].makes(words_digest(words)):
            raise DamagedFrameError(frame, "the words rebuilt have another digest than signed")
        yield frame, words


async def _payload(fetcher: Fetcher, manifest: Manifest, frame: int) -> bytes:
    got = b""

    def put(_: int, payload: bytes) -> None:
        nonlocal got
        check_payload(frame, payload, manifest)
        got = payload

    if manifest.frames[frame].payload_bytes:
        await fetcher.fetch(manifest, (frame,), put)
    return got
