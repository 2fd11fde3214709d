"""Keeps the engine on the newest policy version, in the background of everything else.

    announcement --> plan --> fetch, stage, verify --> remember --> hand over between decode steps
         ^             |        |                                      |
         |             |        `-- useless since a newer one: drop    |
         `-------------+-----------------------------------------------'

Each version on the way to the head is verified and handed over: over a slow link a version nearer
to the head is worth having. What is held is in one array, what is staged in another; they change
places when the engine has taken the new words. Only a way that starts at the public base model
again, after a long sleep, needs a third for as long as it takes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from node.errors import Reason, RefusedError
from node.policy import Announcement, Artifact, ArtifactKey
from node.rpc.channel import Backoff, ConnectionLost
from node.telemetry.transfer_metrics import TransferMetrics
from node.until import run_until
from node.weights.advance import Remedy, fetch_version, repair_version
from node.weights.chain import PUBLIC_VERSION
from node.weights.digests import Words
from node.weights.fetch import Fetcher
from node.weights.head_file import Head, StoreMark
from node.weights.held import HeldPolicy
from node.weights.layout import Layout
from node.weights.manifest import Manifest
from sampler.delta_log import StagedArtifact
from sampler.policy_disk import PolicyDisk
from sampler.sync_state import SyncState

logger = logging.getLogger(__name__)


class CountRefusal(Protocol):
    """``NodeMetrics.count_refusal``."""

    def __call__(self, *, service: str, reason: Reason) -> None: ...


@dataclass(frozen=True, slots=True)
class _Fetched:
    manifest: Manifest
    policy: HeldPolicy
    staged: StagedArtifact | None


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
        disk: PolicyDisk,
        transfer_metrics: TransferMetrics,
        count_refusal: CountRefusal,
        random: Callable[[], float],
    ) -> None:
        """Put it together.

        Args:
            watch: Announcements for as long as anyone listens.
            words0: Reads the base model; called in a thread.
            hand_over: Returns when the engine has taken the words.
            disk: What a restart goes on from; its calls are made in threads.
            random: Draws in [0, 1), for the backoff.
        """
        self._fetcher = fetcher
        self._watch = watch
        self._layout = layout
        self._words0 = words0
        self._hand_over = hand_over
        self._disk = disk
        self._transfer_metrics = transfer_metrics
        self._count_refusal = count_refusal
        self._backoff = Backoff(random)
        self._changed = asyncio.Event()
        self._is_doubted = False
        self._newest_served = 0
        self._spare: Words | None = None
        self._published_at_s: float | None = None

    def age_s(self, now: float) -> float:
        """Give the seconds since the held version was published; 0 for the base model or a saved copy."""
        return 0.0 if self._published_at_s is None else max(0.0, now - self._published_at_s)

    def doubt(self) -> None:
        """Compare what is held with what was signed, and mend it: the hub says that it is something else."""
        self._is_doubted = True
        self._changed.set()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Follow the head until ``stopping``.

        Raises:
            StartupError: what is on disk cannot be used.
            RefusedError: no source will ever announce anything to this peer.
        """
        self._mark = await asyncio.to_thread(self._disk.load_mark)
        self._held, manifest = await asyncio.to_thread(self._disk.load, self._read_base)
        if manifest is not None:
            self._mark = self._admitted(manifest)
        self._state = SyncState(self._held.version, self._mark.high_water)
        ready()
        await run_until(stopping, self._follow())

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            await self._serve()
            while True:
                self._changed.clear()
                if self._is_doubted:
                    await self._resolve_doubt()
                artifact = self._state.next_artifact()
                if artifact is not None:
                    await self._advance(artifact)
                elif self._state.unusable:
                    await self._backoff.wait(self._changed)
                    self._state = self._state.reconsidered()
                else:
                    self._fetcher.expect(self._held.version.number, tasks)
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
                await self._take(fetched)
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

    async def _fetch_unless_useless(self, artifact: Artifact) -> _Fetched | None:
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

    async def _fetch(self, artifact: Artifact) -> _Fetched:
        manifest, signed = await self._fetcher.signed_manifest(artifact.key)
        self._admitted(manifest)
        staged = await asyncio.to_thread(self._disk.stage, manifest, signed)
        held = self._held
        if manifest.base_version == PUBLIC_VERSION != held.version.number:
            held = await asyncio.to_thread(self._read_base)
        # Until the fetch has ended well, threads of a cancelled one may still write into it.
        spare, self._spare = self._spare, None
        policy = await fetch_version(
            self._fetcher,
            manifest,
            layout=self._layout,
            held=held,
            spare=spare,
            remedy=self._remedy(),
            metrics=self._transfer_metrics,
            staging=staged,
        )
        return _Fetched(manifest, policy, staged)

    async def _take(self, fetched: _Fetched) -> None:
        manifest, policy = fetched.manifest, fetched.policy
        mark = self._admitted(manifest)
        await asyncio.to_thread(self._disk.remember, mark, fetched.staged)
        self._mark = mark
        previous, self._held = self._held, policy
        self._state = self._state.advanced(policy.version, mark.high_water)
        self._published_at_s = manifest.published_at_s
        await self._serve()
        self._spare = previous.words
        await asyncio.to_thread(self._disk.fold, policy)

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

    async def _resolve_doubt(self) -> None:
        self._is_doubted = False
        version = self._held.version.number
        artifacts = self._remedy().artifacts
        making_it = [artifact.key for artifact in artifacts if artifact.key.version == version]
        if making_it:
            try:
                await self._repair(making_it[0])
                return
            except (ConnectionLost, RefusedError) as error:
                logger.warning("held policy not mended", extra={"version": version, "detail": str(error)})
        await self._begin_again()

    async def _repair(self, key: ArtifactKey) -> None:
        """Serve what is held again, every frame as it was signed."""
        manifest = await self._fetcher.manifest(key)
        self._held = await repair_version(
            self._fetcher,
            manifest,
            layout=self._layout,
            held=self._held,
            remedy=self._remedy(),
            metrics=self._transfer_metrics,
        )
        logger.warning("held policy mended", extra={"version": manifest.version})
        self._spare = None
        self._state = self._state.advanced(self._held.version, self._state.high_water)
        await self._serve()

    async def _begin_again(self) -> None:
        logger.warning("held policy in doubt, beginning again", extra={"version": self._held.version.number})
        self._held = await asyncio.to_thread(self._read_base)
        self._spare = None
        self._state = self._state.advanced(self._held.version, self._state.high_water)
        if self._state.is_at_head:
            await self._serve()

    def _remedy(self) -> Remedy:
        announcement = self._state.announcement
        return Remedy(() if announcement is None else announcement.artifacts, self._words0)

    def _read_base(self) -> HeldPolicy:
        return HeldPolicy.of(PUBLIC_VERSION, self._words0(), layout=self._layout)
