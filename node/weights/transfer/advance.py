"""One step of a chain: fetch an artifact into the assembly of a version.

A caller walks the path of ``cheapest_chain.plan_catch_up``. Before the last step it lets its ``HighWater``
admit the manifest, and keeps the new mark.
"""

import asyncio
import time
from typing import Protocol

from node.errors import Reason, RefusedError
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.assembly.apply import WrongBaseError
from node.weights.format.manifest import Manifest
from node.weights.transfer.fetcher import Fetcher


class Assembly(Protocol):
    """A version being assembled. Called in threads."""

    def take_held(self) -> tuple[int, ...]:
        """Use what the base has already; return the unchanged frames that are wrong there."""

    def missing(self) -> tuple[int, ...]:
        """Return the frames whose payload is still needed."""

    def put(self, frame: int, payload: bytes) -> None:
        """Apply a payload. Raises DamagedFrameError or WrongBaseError."""


async def fetch_into(
    assembly: Assembly, fetcher: Fetcher, manifest: Manifest, *, metrics: TransferMetrics
) -> None:
    """Fetch the frames that ``assembly`` lacks of the manifest's version.

    Raises:
        RefusedError: WRONG_BASE: the base is not what it claims to be, once every other frame is fetched;
            others as ``Fetcher.fetch``.
        ConnectionLost: as ``Fetcher.fetch``.
    """
    wrong = set(await asyncio.to_thread(assembly.take_held))

    def put(frame: int, payload: bytes) -> None:
        started = time.perf_counter()
        try:
            assembly.put(frame, payload)
        except WrongBaseError:
            wrong.add(frame)
        else:
            codec = manifest.frames[frame].codec.name.lower()
            metrics.count_applied_frame(codec, took_s=time.perf_counter() - started)

    started = time.perf_counter()
    await fetcher.fetch(manifest, [frame for frame in assembly.missing() if frame not in wrong], put)
    metrics.count_fetch(manifest.key, took_s=time.perf_counter() - started)
    if wrong:
        raise RefusedError(
            Reason.WRONG_BASE,
            f"{len(wrong)} held frames are not what version {manifest.version} needs",
            fix="start from a keyframe or from the public base model",
        )
