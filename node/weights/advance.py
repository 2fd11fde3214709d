"""One step of a chain: fetch an artifact, apply it to what is held, mend what does not fit.

A caller walks the path of ``chain.plan`` with two arrays that swap places:

    held = await fetch_version(..., held=old, spare=spare)      then spare = old.words

Before the last step it lets its ``HighWater`` admit the manifest, and keeps the new mark.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from node.errors import Reason, RefusedError
from node.policy import NO_BASE, Artifact
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.apply import Stage, WrongBaseError, check_payload, rebuild_frame
from node.weights.chain import plan
from node.weights.digests import Words
from node.weights.fetch import Fetcher
from node.weights.held import HeldPolicy
from node.weights.layout import Layout
from node.weights.manifest import Manifest

MENDED_FRAMES: Final = 64
"""Frames mended one by one; beyond, what is held is not what it claims to be: start from a keyframe."""


async def fetch_version(
    fetcher: Fetcher,
    manifest: Manifest,
    *,
    layout: Layout,
    held: HeldPolicy | None,
    spare: Words | None,
    artifacts: Sequence[Artifact],
    metrics: TransferMetrics,
) -> HeldPolicy:
    """Give the manifest's version, every frame and the root verified; CPU work is done in threads.

    Args:
        manifest: verified, from ``fetcher.manifest``.
        held: what it starts from; for a keyframe anything or nothing.
        spare: overwritten, and then owned by the result; None: allocated.
        artifacts: as announced; where mended frames are rebuilt from.
    Raises:
        RefusedError: WRONG_BASE, if ``held`` cannot be used: plan again from NO_BASE; others as
            ``Stage`` and ``Fetcher.fetch``. ``held`` is as it was, ``spare`` is worthless.
        ConnectionLost: as ``Fetcher.fetch``.
    """
    stage = Stage(manifest, layout=layout, base=held, spare=spare)
    wrong = list(await asyncio.to_thread(stage.take_held))

    def put(frame: int, payload: bytes) -> None:
        started = time.perf_counter()
        try:
            stage.put(frame, payload)
        except WrongBaseError:
            wrong.append(frame)
            return
        codec = manifest.frames[frame].codec.name.lower()
        metrics.count_applied_frame(codec, took_s=time.perf_counter() - started)

    started = time.perf_counter()
    await fetcher.fetch(manifest, stage.missing(), put)
    metrics.count_fetch(manifest.key, took_s=time.perf_counter() - started)
    if wrong:
        await _mend(fetcher, stage, wrong, manifest=manifest, layout=layout, artifacts=artifacts)
        metrics.count_mended_frames(len(wrong))
    return await asyncio.to_thread(stage.finish)


async def _mend(
    fetcher: Fetcher,
    stage: Stage,
    frames: Sequence[int],
    *,
    manifest: Manifest,
    layout: Layout,
    artifacts: Sequence[Artifact],
) -> None:
    path = plan(NO_BASE, manifest.version, artifacts)
    if path is None or len(frames) > MENDED_FRAMES:
        raise RefusedError(
            Reason.WRONG_BASE,
            f"{len(frames)} frames held are not of version {manifest.base_version}",
            fix="start from a keyframe or from the public base model",
        )
    manifests = [await fetcher.manifest(artifact.key) for artifact in path]
    for each in manifests:
        each.check_layout(layout)
    for frame in frames:
        steps = [(each, await _payload(fetcher, each, frame)) for each in manifests]
        words = await asyncio.to_thread(rebuild_frame, frame, steps, layout=layout)
        await asyncio.to_thread(stage.mend, frame, words)


async def _payload(fetcher: Fetcher, manifest: Manifest, frame: int) -> bytes:
    got = b""

    def put(_: int, payload: bytes) -> None:
        nonlocal got
        check_payload(frame, payload, manifest)
        got = payload

    if manifest.frames[frame].payload_bytes:
        await fetcher.fetch(manifest, (frame,), put)
    return got
