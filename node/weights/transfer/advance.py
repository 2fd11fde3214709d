"""One step of a chain: fetch an artifact, apply it to what is held, mend what does not fit.

A caller walks the path of ``chain.plan_catch_up`` with two arrays that swap places:

    held = await fetch_version(..., held=old, spare=spare)      then spare = old.words

Before the last step it lets its ``HighWater`` admit the manifest, and keeps the new mark.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from node.errors import Reason, RefusedError
from node.policy import NO_BASE, Artifact
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.assembly.apply import DamagedFrameError, Stage, WrongBaseError, check_payload, rebuild_frame
from node.weights.assembly.held import HeldPolicy
from node.weights.format.digests import Words, words_digest
from node.weights.format.layout import FrameSpan, Layout
from node.weights.format.manifest import Manifest
from node.weights.planning.chain import plan, plan_fresh
from node.weights.transfer.fetch import Fetcher

MENDED_FRAMES: Final = 64
"""Frames mended one by one; beyond, what is held is not what it claims to be: begin again."""


class Staged(Protocol):
    """A version being put together, as ``node.weights.assembly.apply.Stage``. Called in threads."""

    def take_held(self) -> tuple[int, ...]:
        """Take what the base has already, and give the frames to be mended."""
        ...

    def missing(self) -> tuple[int, ...]:
        """Give the frames whose payload is still needed."""
        ...

    def put(self, frame: int, payload: bytes) -> None:
        """Take a payload; raise DamagedFrameError or WrongBaseError."""
        ...

    def mend(self, frame: int, words: Words) -> None:
        """Take the words of a frame."""
        ...


@dataclass(frozen=True, slots=True)
class Remedy:
    """What frames are rebuilt from when the words held are not what they should be."""

    artifacts: Sequence[Artifact] = ()
    """As announced."""
    public_frame: Callable[[FrameSpan], Words] | None = None
    """Reads a frame of the public base model, in a thread; None: only keyframes help."""


async def fetch_version(
    fetcher: Fetcher,
    manifest: Manifest,
    *,
    layout: Layout,
    held: HeldPolicy | None,
    spare: Words | None,
    remedy: Remedy,
    metrics: TransferMetrics,
) -> HeldPolicy:
    """Give the manifest's version, every frame and the root verified; CPU work is done in threads.

    Args:
        manifest: verified, from ``fetcher.manifest``.
        held: what it starts from; for a keyframe anything or nothing.
        spare: overwritten, and then owned by the result; None: allocated.
    Raises:
        RefusedError: WRONG_BASE, if ``held`` cannot be used: plan again from NO_BASE; others as
            ``Stage`` and ``Fetcher.fetch``. ``held`` is as it was, ``spare`` is worthless.
        ConnectionLost: as ``Fetcher.fetch``.
    """
    stage = Stage(manifest, layout=layout, base=held, spare=spare)
    await fetch_into(stage, fetcher, manifest, layout=layout, remedy=remedy, metrics=metrics)
    return await asyncio.to_thread(stage.finish)


async def fetch_into(
    stage: Staged,
    fetcher: Fetcher,
    manifest: Manifest,
    *,
    layout: Layout,
    remedy: Remedy,
    metrics: TransferMetrics,
) -> None:
    """Put every frame of the manifest's version that ``stage`` lacks into it, and mend what does not fit.

    Raises:
        RefusedError: WRONG_BASE, if too much has to be mended or there is nothing to mend it from;
            others as ``Fetcher.fetch``.
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
        await asyncio.to_thread(stage.mend, frame, words)
    metrics.count_repaired_frames(len(wrong))


async def rebuilt_frames(
    fetcher: Fetcher, frames: Sequence[int], manifest: Manifest, *, layout: Layout, remedy: Remedy
) -> AsyncIterator[tuple[int, Words]]:
    """Yield the words of frames of the manifest's version, fetched for these frames alone.

    Raises:
        RefusedError: WRONG_BASE, if they are too many or there is nothing to make them from; others as
            ``Fetcher.fetch``.
        ConnectionLost: as ``Fetcher.fetch``.
    """
    if not frames:
        return
    path, public_frame = plan(NO_BASE, manifest.version, remedy.artifacts), None
    if path is None and remedy.public_frame is not None:
        path = plan_fresh(manifest.version, remedy.artifacts)
        public_frame = remedy.public_frame
    if path is None or len(frames) > MENDED_FRAMES:
        raise RefusedError(
            Reason.WRONG_BASE,
            f"{len(frames)} frames held are not what version {manifest.version} needs",
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
