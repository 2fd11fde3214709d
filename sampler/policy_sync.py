"""Keeps the engine on the newest policy version, in the background of everything else.

    announcement --> plan --> fetch, stage, verify --> remember --> hand over between decode steps
         ^             |        |                                      |
         |             |        `-- useless since a newer one: drop    |
         `-------------+-----------------------------------------------'

Each version on the way to the head is verified and handed over: over a slow link a version nearer
to the head is worth having. What is held is in one array, what is staged in another; they change
places when the engine has taken the new words.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

from node.clock import Clock
from node.errors import Reason, RefusedError, StartupError
from node.policy import Announcement, Artifact
from node.rpc.channel import Backoff, ConnectionLost
from node.telemetry.transfer_metrics import TransferMetrics
from node.until import run_until
from node.weights.advance import fetch_version
from node.weights.digests import Words
from node.weights.fetch import Fetcher
from node.weights.head_file import Head, StoreMark
from node.weights.held import HeldPolicy
from node.weights.layout import Layout
from node.weights.manifest import Manifest
from sampler.held_file import load_held, save_held
from sampler.sync_state import SyncState

logger = logging.getLogger(__name__)

HELD_FILE: Final = "held.words"
MARK_FILE: Final = "high_water.json"


class CountRefusal(Protocol):
    """``NodeMetrics.count_refusal``."""

    def __call__(self, *, service: str, reason: Reason) -> None: ...


class PolicySync:
    """A service; ready once it has something to serve."""

    name = "policy sync"

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        watch: Callable[[], AsyncIterator[Announcement]],
        layout: Layout,
        words0: Callable[[], Words],
        hand_over: Callable[[HeldPolicy], Awaitable[None]],
        state_dir: Path,
        save_every_s: float,
        transfer_metrics: TransferMetrics,
        count_refusal: CountRefusal,
        clock: Clock,
        random: Callable[[], float],
    ) -> None:
        """Put it together.

        Args:
            watch: Announcements for as long as anyone listens.
            words0: Reads the base model; called in a thread.
            hand_over: Returns when the engine has taken the words.
            state_dir: Where the high-water mark and a copy of the held policy are kept.
            save_every_s: Shortest time between two copies.
            random: Draws in [0, 1), for the backoff.
        """
        self._fetcher = fetcher
        self._watch = watch
        self._layout = layout
        self._words0 = words0
        self._hand_over = hand_over
        self._held_path = state_dir / HELD_FILE
        self._mark_path = state_dir / MARK_FILE
        self._save_every_s = save_every_s
        self._transfer_metrics = transfer_metrics
        self._count_refusal = count_refusal
        self._clock = clock
        self._backoff = Backoff(random)
        self._changed = asyncio.Event()
        self._is_doubted = False
        self._newest_served = 0
        self._saved_version = 0
        self._saved_at_s = clock.monotonic()
        self._spare: Words | None = None
        self._published_at_s: float | None = None

    def age_s(self, now: float) -> float:
        """Give the seconds since the held version was published; 0 for the base model or a saved copy."""
        return 0.0 if self._published_at_s is None else max(0.0, now - self._published_at_s)

    def doubt(self) -> None:
        """Fetch the head from the beginning: the hub says that what is held is not what was signed."""
        self._is_doubted = True
        self._changed.set()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Follow the head until ``stopping``; then keep a copy of what is held.

        Raises:
            StartupError: the high-water mark cannot be read.
            RefusedError: the hub will never announce anything to this peer.
        """
        self._mark = await asyncio.to_thread(self._load_mark)
        saved = await asyncio.to_thread(load_held, self._held_path, self._layout)
        self._saved_version = 0 if saved is None else saved.version.number
        self._held = saved or await self._base()
        self._state = SyncState(self._held.version, self._mark.high_water)
        ready()
        await run_until(stopping, self._follow())
        await self._save()

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            await self._serve()
            while True:
                self._changed.clear()
                if self._is_doubted:
                    await self._begin_again()
                artifact = self._state.next_artifact()
                if artifact is not None:
                    await self._advance(artifact)
                elif self._state.unusable:
                    await self._backoff.wait(self._changed)
                    self._state = self._state.reconsidered()
                else:
                    await self._changed.wait()

    async def _listen(self) -> None:
        async for announcement in self._watch():
            try:
                self._state = self._state.announced(announcement)
            except RefusedError as refused:
                self._count_refusal(service="PolicyService", reason=refused.reason)
                logger.warning("announcement refused", extra={"detail": str(refused)})
            self._changed.set()

    async def _advance(self, artifact: Artifact) -> None:
        try:
            fetched = await self._fetch_unless_useless(artifact)
            if fetched is not None:
                await self._take(*fetched)
                self._backoff.reset()
        except ConnectionLost as lost:
            logger.info("fetch interrupted", extra={"artifact": str(artifact.key), "detail": str(lost)})
            await self._backoff.wait(self._changed)
        except RefusedError as refused:
            self._count_refusal(service="PolicyService", reason=refused.reason)
            logger.warning(
                "artifact not usable", extra={"artifact": str(artifact.key), "detail": str(refused)}
            )
            self._state = self._state.failed(artifact.key)

    async def _fetch_unless_useless(self, artifact: Artifact) -> tuple[Manifest, HeldPolicy] | None:
        fetching = asyncio.create_task(self._fetch(artifact))
        try:
            while not fetching.done():
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({fetching, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._changed.clear()
                if not fetching.done() and (self._is_doubted or self._state.is_useless(artifact.key)):
                    logger.info("fetch dropped", extra={"artifact": str(artifact.key)})
                    return None
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        return fetching.result()

    async def _fetch(self, artifact: Artifact) -> tuple[Manifest, HeldPolicy]:
        announcement = self._state.announcement
        manifest = await self._fetcher.manifest(artifact.key)
        self._admitted(manifest)
        # Until the fetch has ended well, threads of a cancelled one may still write into it.
        spare, self._spare = self._spare, None
        policy = await fetch_version(
            self._fetcher,
            manifest,
            layout=self._layout,
            held=self._held,
            spare=spare,
            artifacts=() if announcement is None else announcement.artifacts,
            metrics=self._transfer_metrics,
        )
        return manifest, policy

    async def _take(self, manifest: Manifest, policy: HeldPolicy) -> None:
        mark = self._admitted(manifest)
        try:
            await asyncio.to_thread(mark.save, self._mark_path)
        except OSError as error:
            raise RefusedError(Reason.DISK, f"{self._mark_path} cannot be written: {error}") from error
        self._mark = mark
        previous, self._held = self._held, policy
        self._state = self._state.advanced(policy.version, mark.high_water)
        self._published_at_s = manifest.published_at_s
        await self._serve()
        self._spare = previous.words
        if self._clock.monotonic() - self._saved_at_s >= self._save_every_s:
            await self._save()

    def _admitted(self, manifest: Manifest) -> StoreMark:
        """Give the mark after believing a manifest; versions on the way to the head leave it as it is."""
        seen = self._mark
        if seen.head is not None and manifest.version < seen.head.number:
            return seen
        seen.high_water.admit(learner_epoch=manifest.learner_epoch, version=manifest.policy_version)
        head = Head(
            number=manifest.version,
            root=manifest.root.hex(),
            learner_epoch=manifest.learner_epoch,
            published_at_s=manifest.published_at_s,
        )
        return StoreMark(learner_epoch=manifest.learner_epoch, head=head)

    async def _serve(self) -> None:
        version = self._held.version
        if version.number < self._newest_served:
            # On the way back to a version that was in doubt.
            return
        self._newest_served = version.number
        await self._hand_over(self._held)
        logger.info("version held", extra={"version": version.number, "root": version.root.hex()})

    async def _begin_again(self) -> None:
        self._is_doubted = False
        logger.warning("held policy in doubt, beginning again", extra={"version": self._held.version.number})
        self._held = await self._base()
        self._spare = None
        self._state = self._state.advanced(self._held.version, self._state.high_water)
        if self._state.is_at_head:
            await self._serve()

    async def _base(self) -> HeldPolicy:
        words = await asyncio.to_thread(self._words0)
        return await asyncio.to_thread(HeldPolicy.of, 0, words, layout=self._layout)

    async def _save(self) -> None:
        if self._held.version.number == self._saved_version:
            return
        try:
            await asyncio.to_thread(save_held, self._held_path, self._held)
        except OSError as error:
            logger.warning("policy not saved", extra={"detail": str(error)})
            return
        self._saved_version = self._held.version.number
        self._saved_at_s = self._clock.monotonic()

    def _load_mark(self) -> StoreMark:
        try:
            return StoreMark.load(self._mark_path)
        except (OSError, ValueError) as error:
            raise StartupError(
                f"{self._mark_path} cannot be read: {error}",
                fix="Restore it; without it this sampler would believe policies older than it has seen",
            ) from error
