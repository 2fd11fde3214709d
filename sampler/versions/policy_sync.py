"""Keeps the engine on the newest policy version, in the background of everything else.

    announcement --> plan --> fetch, stage, verify --> remember --> hand over between decode steps
         ^             |        |                                      |
         |             |        `-- not worth finishing: drop          |
         `-------------+-----------------------------------------------'

What to fetch from near and from far, and what to finish, is decided in ``node.weights.planning.pursuit``.
Each version on the way to the head is verified and handed over: over a slow link a version nearer
to the head is worth having. What is handed over is a change of the engine's live words: to a spare
copy that is the new version, or frame by frame in place (see ``version_assembly``). When a change fails
half way nothing is served until the live words are made again from the disk.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from node.errors import CountRefusal, Reason, RefusedError
from node.policy import Announcement, Artifact, ArtifactKey, PolicyVersion
from node.rpc.channel import Backoff, ConnectionLost
from node.telemetry.transfer_metrics import TransferMetrics
from node.waits import run_until
from node.weights.format.digests import version_root, words_digest
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest
from node.weights.planning.chain import PUBLIC_VERSION
from node.weights.store.head_file import Head, StoreMark
from node.weights.transfer.advance import Remedy, fetch_into, rebuilt_frames
from node.weights.transfer.fetcher import Fetcher
from sampler.engines.engine_thread import Change
from sampler.engines.model_words import LiveWords, ModelWords, copy_words, frame_digests
from sampler.metrics import SamplerMetrics
from sampler.versions.delta_log import LoggedArtifact
from sampler.versions.fetch_choice import FetchChoice
from sampler.versions.memory_scrub import MemoryScrub
from sampler.versions.saved_policy import SavedPolicy
from sampler.versions.starvation import DroppedFetch
from sampler.versions.sync_state import SyncState
from sampler.versions.version_assembly import InPlaceAssembly, SpareAssembly, VersionAssembly

logger = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 0.25
"""How late it may be noticed that a fetch is not worth finishing."""


@dataclass(frozen=True, slots=True)
class _Fetched:
    version: VersionAssembly
    payloads: LoggedArtifact | None


class PolicySync:
    """A service; ready once it has something to serve."""

    name = "policy sync"

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        watch: Callable[[], AsyncIterator[Announcement]],
        layout: Layout,
        weights: LiveWords,
        in_place: bool,
        hand_over: Callable[[Change], Awaitable[PolicyVersion | None]],
        found_damage: Callable[[], None],
        disk: SavedPolicy,
        transfer_metrics: TransferMetrics,
        metrics: SamplerMetrics,
        count_refusal: CountRefusal,
        waiting: Callable[[str], AbstractContextManager[None]],
        monotonic: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        """Put it together.

        Args:
            watch: Announcements for as long as anyone listens.
            weights: The base model's, until this runs.
            in_place: Write versions over the live one; otherwise into a spare copy first.
            hand_over: Returns when the engine has made the change, or raises what it raised.
            found_damage: Told when the live words are not what was verified; calls ``doubt``.
            disk: What a restart goes on from; its calls are made in threads.
            waiting: ``NodeMetrics.waiting``.
            random: Draws in [0, 1), for the backoff.
        """
        self._fetcher = fetcher
        self._watch = watch
        self._layout = layout
        self._weights = weights
        self._in_place = in_place
        self._hand_over = hand_over
        self._found_damage = found_damage
        self._disk = disk
        self._transfer_metrics = transfer_metrics
        self._fetching = FetchChoice(fetcher, metrics=metrics, waiting=waiting, monotonic=monotonic)
        self._count_refusal = count_refusal
        self._backoff = Backoff(random)
        self._changed = asyncio.Event()
        self._is_doubted = False
        self._scrub = MemoryScrub(layout)
        self._scrub_is_due = asyncio.Event()
        self._is_changing = asyncio.Lock()
        self._newest_served = 0
        self._is_following = False
        self._spare: ModelWords | None = None
        self._published_at_s: float | None = None

    def age_s(self, now: float) -> float:
        """Give the seconds since the held version was published; 0 for the base model or a saved copy."""
        return 0.0 if self._published_at_s is None else max(0.0, now - self._published_at_s)

    def starving_s(self) -> float:
        """Return for how long newer versions have been there and none was taken."""
        return self._fetching.starving_s()

    def distance(self, *, bound_versions: int) -> str:
        """Return, for people, how far this sampler is from where its groups would be trained on."""
        behind = self._state.behind_versions if self._is_following else 0
        return self._fetching.distance(behind, bound_versions=bound_versions)

    def doubt(self) -> None:
        """Compare what is held with what was signed, and mend it: the hub says that it is something else."""
        self._is_doubted = True
        self._changed.set()

    def scrub(self) -> None:
        """Look at some of the live words again: whether they are still what was verified."""
        self._scrub_is_due.set()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Follow the head until ``stopping``.

        Raises:
            StartupError: what is on disk cannot be used.
            RefusedError: no source will ever announce anything to this peer.
        """
        self._mark = await asyncio.to_thread(self._disk.load_mark)
        self._base = await asyncio.to_thread(self._disk.keep_base, self._weights.live)
        self._held, manifest = await asyncio.to_thread(self._disk.load, self._weights, base=self._base)
        if manifest is not None:
            self._mark = self._admitted(manifest)
        self._state = SyncState(self._held, self._mark.high_water)
        self._is_following = True
        await asyncio.to_thread(self._scrub.take_stock, self._weights.live)
        ready()
        await run_until(stopping, self._follow())

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            await self._serve(lambda: self._held)
            tasks.create_task(self._scrub_for_ever())
            while True:
                self._changed.clear()
                if self._is_doubted:
                    await self._resolve_doubt()
                artifact = await self._fetching.next_artifact(lambda: self._state, tasks)
                if artifact is not None:
                    await self._advance(artifact)
                elif self._state.unusable:
                    await self._backoff.wait(self._changed)
                    self._state = self._state.reconsidered()
                else:
                    self._fetcher.prefetch(self._held.number, tasks)
                    await self._changed.wait()

    async def _listen(self) -> None:
        async for announcement in self._watch():
            try:
                self._state = self._state.announced(announcement)
                self._fetching.announced(announcement, self._state)
            except RefusedError as refused:
                self._count_refusal(service="PolicyService", reason=refused.reason)
                logger.warning("announcement refused", extra={"detail": str(refused)})
            self._changed.set()

    async def _advance(self, artifact: Artifact) -> None:
        try:
            with self._fetching.waits():
                fetched = await self._fetch_unless_useless(artifact)
            if fetched is not None:
                await self._take(fetched)
                self._backoff.reset()
        except ConnectionLost as lost:
            self._fetching.count(DroppedFetch.LOST)
            logger.info("fetch interrupted", extra={"artifact": str(artifact.key), "detail": str(lost)})
            await self._backoff.wait(self._changed)
        except RefusedError as refused:
            self._fetching.count(DroppedFetch.REFUSED)
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
                # The time that passes decides too.
                await asyncio.wait(
                    {fetching, changed}, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                )
                changed.cancel()
                self._changed.clear()
                if fetching.done():
                    break
                reason = self._fetching.reason_to_drop(artifact, self._state)
                if self._is_doubted:
                    reason = DroppedFetch.DOUBT
                if reason is not None:
                    self._fetching.drop(artifact, reason)
                    return None
                self._fetching.tell_starvation(self._state)
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        return fetching.result()

    async def _fetch(self, artifact: Artifact) -> _Fetched:
        manifest, signed = await self._fetcher.signed_manifest(artifact.key)
        self._admitted(manifest)
        staged = await asyncio.to_thread(self._disk.stage, manifest, signed)
        version = self._begun(manifest, staged)
        await fetch_into(
            version,
            self._fetcher,
            manifest,
            layout=self._layout,
            remedy=self._remedy(),
            metrics=self._transfer_metrics,
        )
        await asyncio.to_thread(version.finish)
        return _Fetched(version, staged)

    async def _take(self, fetched: _Fetched) -> None:
        version, manifest = fetched.version, fetched.version.manifest
        mark = self._admitted(manifest)
        await asyncio.to_thread(self._disk.remember, mark, fetched.payloads)
        self._mark = mark

        def change() -> PolicyVersion:
            version.apply()
            self._held = manifest.policy_version
            self._scrub.verified(version.digests)
            return self._held

        try:
            await self._serve(change)
        except RefusedError as refused:
            self._count_refusal(service="PolicyService", reason=refused.reason)
            logger.warning(
                "version not applied, going back to the disk",
                extra={"version": manifest.version, "detail": str(refused)},
            )
            await self._restore()
            return
        self._state = self._state.advanced(self._held, mark.high_water)
        self._fetching.took(self._state)
        self._published_at_s = manifest.published_at_s
        if isinstance(version, SpareAssembly):
            self._spare = version.spare
        if self._held.number >= self._newest_served:
            # Others are on the way to a newer one, and the disk may have what was served before them.
            await asyncio.to_thread(self._disk.fold, self._held, self._weights.live)

    def _begun(self, manifest: Manifest, staged: LoggedArtifact | None) -> VersionAssembly:
        base, base_version = self._weights.live, self._held
        if manifest.base_version == PUBLIC_VERSION != self._held.number:
            base, base_version = self._base.words, self._base.version
        if self._in_place:
            return InPlaceAssembly(
                manifest,
                layout=self._layout,
                base=base,
                base_version=base_version,
                payloads=staged,
                weights=self._weights,
            )
        # Until the fetch has ended well, threads of a cancelled one may still write into it.
        spare, self._spare = self._spare, None
        return SpareAssembly(
            manifest,
            layout=self._layout,
            base=base,
            base_version=base_version,
            payloads=staged,
            weights=self._weights,
            spare=self._weights.new_spare() if spare is None else spare,
        )

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

    async def _serve(self, change: Callable[[], PolicyVersion]) -> None:
        """Hand a change over, and have what it makes sampled from.

        Raises:
            RefusedError: what ``change`` raised; nothing is served any more.
        """

        def serving() -> PolicyVersion | None:
            version = change()
            # None on the way back to a version that was in doubt.
            return version if version.number >= self._newest_served else None

        async with self._is_changing:
            version = await self._hand_over(serving)
        if version is not None:
            self._newest_served = version.number
            logger.info("version held", extra={"version": version.number, "root": version.root.hex()})

    async def _restore(self) -> None:
        """Go on from the newest version on disk."""

        def change() -> PolicyVersion:
            self._held, _ = self._disk.load(self._weights, base=self._base)
            self._scrub.take_stock(self._weights.live)
            return self._held

        await self._serve(change)
        self._state = self._state.advanced(self._held, self._state.high_water)

    async def _scrub_for_ever(self) -> None:
        while True:
            await self._scrub_is_due.wait()
            self._scrub_is_due.clear()
            async with self._is_changing:
                frame = await asyncio.to_thread(self._scrub.turn, self._weights.live)
            if frame is not None:
                logger.error("memory damaged", extra={"version": self._held.number, "frame": frame})
                self._found_damage()

    async def _resolve_doubt(self) -> None:
        self._is_doubted = False
        artifacts = self._remedy().artifacts
        making_it = [artifact.key for artifact in artifacts if artifact.key.version == self._held.number]
        if making_it:
            try:
                await self._repair(making_it[0])
                return
            except (ConnectionLost, RefusedError) as error:
                logger.warning(
                    "held policy not mended", extra={"version": self._held.number, "detail": str(error)}
                )
        await self._begin_again()

    async def _repair(self, key: ArtifactKey) -> None:
        """Serve what is held again, every frame as it was signed."""
        manifest = await self._fetcher.manifest(key)
        manifest.check_layout(self._layout)
        wrong = await asyncio.to_thread(self._differing, manifest)
        mended = [
            (self._layout.frames[frame], words)
            async for frame, words in rebuilt_frames(
                self._fetcher, wrong, manifest, layout=self._layout, remedy=self._remedy()
            )
        ]

        def change() -> PolicyVersion:
            for span, words in mended:
                self._weights.live.write(span, words)
            self._weights.settle()
            digests = frame_digests(self._weights.live, self._layout.frames)
            if version_root(self._layout.digest, digests) != manifest.root:
                raise RefusedError(
                    Reason.DAMAGED, f"version {manifest.version} was mended and is still not as signed"
                )
            self._held = manifest.policy_version
            self._scrub.verified(digests)
            return self._held

        await self._serve(change)
        self._transfer_metrics.count_repaired_frames(len(mended))
        logger.warning("held policy mended", extra={"version": manifest.version, "frames": len(mended)})
        self._state = self._state.advanced(self._held, self._state.high_water)

    async def _begin_again(self) -> None:
        logger.warning("held policy in doubt, beginning again", extra={"version": self._held.number})
        self._state = self._state.advanced(self._base.version, self._state.high_water)
        is_head = self._state.is_at_head

        def change() -> PolicyVersion | None:
            copy_words(self._base.words, self._weights.live, layout=self._layout)
            self._weights.settle()
            self._held = self._base.version
            self._scrub.take_stock(self._weights.live)
            return self._held if is_head else None

        async with self._is_changing:
            await self._hand_over(change)

    def _differing(self, manifest: Manifest) -> list[int]:
        live, frames = self._weights.live, zip(manifest.frames, self._layout.frames, strict=True)
        return [
            number
            for number, (record, span) in enumerate(frames)
            if not record.makes(words_digest(live.read(span)))
        ]

    def _remedy(self) -> Remedy:
        announcement = self._state.announcement
        artifacts = () if announcement is None else announcement.artifacts
        return Remedy(artifacts, self._base.words.read)
