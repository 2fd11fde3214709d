"""Repairs live words that are not what the learner signed: damaged frames are fetched again, alone.

memory scrub finds a frame --+
                             +--> damaged frames --fetched alone--> written over the live words, all
                             verified
the hub says must_repair ----+         |
                                       '-- no source can repair them: begin again at the base model
"""

import asyncio
import logging
from collections.abc import Callable

from node.errors import RefusedError
from node.policy import ArtifactKey
from node.rpc.channel import ConnectionLost
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.format.layout import Layout
from node.weights.transfer.advance import Remedy, rebuilt_frames
from node.weights.transfer.fetcher import Fetcher
from sampler.versions.held_version import HeldVersion

logger = logging.getLogger(__name__)


class DamageRepair:
    """Looks for damage in the held version and repairs it. For the event loop's thread."""

    def __init__(
        self,
        held: HeldVersion,
        fetcher: Fetcher,
        *,
        layout: Layout,
        transfer_metrics: TransferMetrics,
        found_damage: Callable[[], None],
    ) -> None:
        """Repair ``held``; ``found_damage`` is called when the memory scrub finds a damaged frame."""
        self._held = held
        self._fetcher = fetcher
        self._layout = layout
        self._transfer_metrics = transfer_metrics
        self._found_damage = found_damage
        self._scrub_is_due = asyncio.Event()

    def scrub(self) -> None:
        """Hash some of the live words again, soon."""
        self._scrub_is_due.set()

    async def scrub_when_due(self) -> None:
        """Scrub each time ``scrub`` is called, until cancelled."""
        while True:
            await self._scrub_is_due.wait()
            self._scrub_is_due.clear()
            frame = await self._held.check_next_frames()
            if frame is not None:
                logger.error("memory damaged", extra={"version": self._held.version.number, "frame": frame})
                self._found_damage()

    async def repair(self, remedy: Remedy) -> bool:
        """Compare the held version with what was signed, repair it and serve it again.

        Returns:
            Whether the held version is right again.
        """
        number = self._held.version.number
        key = next((a.key for a in remedy.artifacts if a.key.version == number), None)
        if key is None:
            return False
        try:
            await self._repair(key, remedy)
        except (ConnectionLost, RefusedError) as error:
            logger.warning("held policy not repaired", extra={"version": number, "detail": str(error)})
            return False
        return True

    async def _repair(self, key: ArtifactKey, remedy: Remedy) -> None:
        manifest = await self._fetcher.manifest(key)
        manifest.check_layout(self._layout)
        damaged = await asyncio.to_thread(self._held.damaged_frames, manifest)
        rebuilt = rebuilt_frames(self._fetcher, damaged, manifest, layout=self._layout, remedy=remedy)
        frames = [(self._layout.frames[frame], words) async for frame, words in rebuilt]
        await self._held.repair(manifest, frames)
        self._transfer_metrics.count_repaired_frames(len(frames))
        logger.warning("held policy repaired", extra={"version": manifest.version, "frames": len(frames)})
