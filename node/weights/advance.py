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

import numpy as np

from node.errors import Reason, RefusedError
from node.policy import NO_BASE, Artifact
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.apply import DamagedFrameError, Stage, WrongBaseError, check_payload, rebuild_frame
from node.weights.chain import plan, plan_fresh
from node.weights.digests import Words, words_digest
from node.weights.fetch import Fetcher
from node.weights.held import HeldPolicy
from node.weights.layout import Layout
from node.weights.manifest import Manifest

MENDED_FRAMES: Final = 64
"""Frames mended one by one; beyond, what is held is not what it claims to be: begin again."""


class Staging(Protocol):
    """Payloads of one artifact that outlive the process. Called in threads."""

    def payload(self, frame: int) -> bytes | None:
        """Give a payload that arrived earlier; None: fetch it."""
        ...

    def keep(self, frame: int, payload: bytes) -> None:
        """Take a payload that arrived and was verified."""
        ...


@dataclass(frozen=True, slots=True)
class Remedy:
    """What frames are rebuilt from when the words held are not what they should be."""

    artifacts: Sequence[Artifact] = ()
    """As announced."""
    words0: Callable[[], Words] | None = None
    """Reads the public base model, in a thread; None: only keyframes help."""


async def fetch_version(
    fetcher: Fetcher,
    manifest: Manifest,
    *,
    layout: Layout,
    held: HeldPolicy | None,
    spare: Words | None,
    remedy: Remedy,
    metrics: TransferMetrics,
    staging: Staging | None = None,
) -> HeldPolicy:
    """Give the manifest's version, every frame and the root verified; CPU work is done in threads.

    Args:
        manifest: verified, from ``fetcher.manifest``.
        held: what it starts from; for a keyframe anything or nothing.
        spare: overwritten, and then owned by the result; None: allocated.
        staging: what arrived before a restart is taken from here, what arrives now is left here.
    Raises:
        RefusedError: WRONG_BASE, if ``held`` cannot be used: plan again from NO_BASE; others as
            ``Stage`` and ``Fetcher.fetch``. ``held`` is as it was, ``spare`` is worthless.
        ConnectionLost: as ``Fetcher.fetch``.
    """
    stage = Stage(manifest, layout=layout, base=held, spare=spare)
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
        if staging is not None:
            staging.keep(frame, payload)

    if staging is not None:
        await asyncio.to_thread(_put_staged, stage, staging, put)
    started = time.perf_counter()
    await fetcher.fetch(manifest, [frame for frame in stage.missing() if frame not in wrong], put)
    metrics.count_fetch(manifest.key, took_s=time.perf_counter() - started)
    async for frame, words in _rebuilt(fetcher, sorted(wrong), manifest, layout=layout, remedy=remedy):
        await asyncio.to_thread(stage.mend, frame, words)
    metrics.count_mended_frames(len(wrong))
    return await asyncio.to_thread(stage.finish)


async def repair_version(
    fetcher: Fetcher,
    manifest: Manifest,
    *,
    layout: Layout,
    held: HeldPolicy,
    remedy: Remedy,
    metrics: TransferMetrics,
) -> HeldPolicy:
    """Give the manifest's version, made of what is held and of the frames that differ from what was signed.

    Args:
        manifest: verified, of any artifact that makes the version held.
        held: is not written to.
    Raises:
        RefusedError: WRONG_BASE, if too much differs or there is nothing to mend it from; others as
            ``Fetcher.fetch``.
        ConnectionLost: as ``Fetcher.fetch``.
    """
    manifest.check_layout(layout)
    wrong = await asyncio.to_thread(_differing, held.words, manifest, layout)
    words = await asyncio.to_thread(np.copy, held.words)
    async for frame, right in _rebuilt(fetcher, wrong, manifest, layout=layout, remedy=remedy):
        words[layout.frames[frame].slice] = right
    metrics.count_mended_frames(len(wrong))
    policy = await asyncio.to_thread(HeldPolicy.of, manifest.version, words, layout=layout)
    if policy.version != manifest.policy_version:
        raise RefusedError(
            Reason.DAMAGED, f"version {manifest.version} was mended and is still not as signed"
        )
    return policy


def _put_staged(stage: Stage, staging: Staging, put: Callable[[int, bytes], None]) -> None:
    for frame in stage.missing():
        payload = staging.payload(frame)
        if payload is not None:
            put(frame, payload)


def _differing(words: Words, manifest: Manifest, layout: Layout) -> list[int]:
    return [
        number
        for number, (record, span) in enumerate(zip(manifest.frames, layout.frames, strict=True))
        if words_digest(words[span.slice]) != record.new_digest
    ]


async def _rebuilt(
    fetcher: Fetcher, frames: Sequence[int], manifest: Manifest, *, layout: Layout, remedy: Remedy
) -> AsyncIterator[tuple[int, Words]]:
    """Yield the words of frames of the manifest's version, fetched for these frames alone."""
    if not frames:
        return
    path, start = plan(NO_BASE, manifest.version, remedy.artifacts), None
    if path is None and remedy.words0 is not None:
        path = plan_fresh(manifest.version, remedy.artifacts)
        start = await asyncio.to_thread(remedy.words0)
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
        base = None if start is None else start[layout.frames[frame].slice]
        words = await asyncio.to_thread(rebuild_frame, frame, steps, layout=layout, start=base)
        if words_digest(words) != manifest.frames[frame].new_digest:
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
