"""The policy version a sampler holds: one set of live words, what is known of them, and how they change.

    begin --frames--> VersionAssembly --remember (disk)--> apply (between two decode steps) --save (disk)-->

A version is a change of the engine's live words: a swap to a spare copy that holds it, or writing it over
them in place. The engine makes the change between two decode steps. If a change fails half way, nothing is
served until the live words are restored from the disk.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from node.errors import Reason, RefusedError
from node.policy import BaseModel, PolicyVersion
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import FrameSpan, Layout
from node.weights.format.manifest import Manifest
from node.weights.planning.cheapest_chain import PUBLIC_VERSION
from node.weights.store.head_file import Head, StoreMark
from node.weights.store.high_water import HighWater
from sampler.engines.engine_thread import Change
from sampler.engines.model_words import LiveWords, ModelWords, copy_words, frame_digests
from sampler.engines.restartable_engine import EngineEndedError
from sampler.versions.memory_scrub import MemoryScrub
from sampler.versions.saved_policy import SavedPolicy
from sampler.versions.version_assembly import InPlaceAssembly, SpareAssembly, VersionAssembly
from sampler.versions.version_files import PublicBase

logger = logging.getLogger(__name__)


class HeldVersion:
    """For the event loop's thread; disk and CPU work runs in other threads. Call ``load`` first.

    Attributes:
        version: What the live words are; the next delta starts from it.
        base: The public base model.
        base_model: The same, as the coordinator is told; empty before ``load``.
    """

    def __init__(
        self,
        weights: LiveWords,
        *,
        layout: Layout,
        in_place: bool,
        hand_over: Callable[[Change], Awaitable[PolicyVersion | None]],
        saved: SavedPolicy,
    ) -> None:
        """Hold ``weights``, which are the base model's.

        Args:
            in_place: Write versions over the live one, even if they could be assembled in a spare copy.
            hand_over: Returns when the engine has made the change, or raises what the change raised.
            saved: What a restart continues from.
        """
        self._weights = weights
        self._layout = layout
        self._in_place = in_place
        self._hand_over = hand_over
        self._saved = saved
        self._scrub = MemoryScrub(layout)
        self._is_changing = asyncio.Lock()
        self._is_lost = False
        self._newest_served = 0
        self._spare: ModelWords | None = None
        self._published_at_s: float | None = None
        self._mark = StoreMark()
        self.version: PolicyVersion
        self.base: PublicBase
        self.base_model = BaseModel()

    @property
    def high_water(self) -> HighWater:
        """The newest version ever believed."""
        return self._mark.high_water

    def age_s(self, now: float) -> float:
        """Return the seconds since the held version was published; 0 for the base model or a saved copy."""
        return 0.0 if self._published_at_s is None else max(0.0, now - self._published_at_s)

    async def load(self) -> None:
        """Load the newest version on disk, else the base model, into the live words.

        Raises:
            StartupError: the disk cannot be used.
            RefusedError: FENCED or ROLLBACK, if the version is older than one believed before.
        """
        self._mark = await asyncio.to_thread(self._saved.load_mark)
        self.base = await asyncio.to_thread(self._saved.keep_base, self._weights.live)
        self.base_model = self.base.model
        self.version, manifest = await asyncio.to_thread(self._saved.load, self._weights, base=self.base)
        if manifest is not None:
            self._mark = self.admit(manifest)
        await asyncio.to_thread(self._scrub.expect_current, self._weights.live)

    async def begin(self, manifest: Manifest, signed: bytes) -> VersionAssembly:
        """Begin to assemble a verified manifest's version; its payloads are logged on disk as they arrive.

        Raises:
            RefusedError: FENCED, ROLLBACK, LAYOUT_MISMATCH, OVER_LIMIT or WRONG_BASE.
        """
        self.admit(manifest)
        payloads = await asyncio.to_thread(self._saved.begin, manifest, signed)
        base, base_version = self._weights.live, self.version
        if manifest.base_version == PUBLIC_VERSION != self.version.number:
            base, base_version = self.base.words, self.base.version
        spares = None if self._in_place else self._weights.spares
        if spares is None:
            return InPlaceAssembly(
                manifest,
                layout=self._layout,
                base=base,
                base_version=base_version,
                payloads=payloads,
                weights=self._weights,
            )
        # Until the fetch has ended well, threads of a cancelled one may still write into the spare.
        spare, self._spare = self._spare, None
        return SpareAssembly(
            manifest,
            layout=self._layout,
            base=base,
            base_version=base_version,
            payloads=payloads,
            spares=spares,
            spare=spares.new_spare() if spare is None else spare,
        )

    async def remember(self, assembly: VersionAssembly) -> None:
        """Put a finished version on disk, before it is served.

        Raises:
            RefusedError: DISK, or FENCED or ROLLBACK.
        """
        mark = self.admit(assembly.manifest)
        await asyncio.to_thread(self._saved.remember, mark, assembly.payloads)
        self._mark = mark

    async def apply(self, assembly: VersionAssembly) -> None:
        """Change the live words to a version that is on disk, and serve it.

        Raises:
            RefusedError: DAMAGED; nothing is served, and ``restore`` has to follow.
        """

        def change() -> PolicyVersion:
            assembly.apply()
            self.version = assembly.manifest.policy_version
            self._scrub.expect(assembly.digests)
            return self.version

        await self._serve(change)
        self._published_at_s = assembly.manifest.published_at_s
        if isinstance(assembly, SpareAssembly):
            self._spare = assembly.spare

    async def serve(self) -> None:
        """Serve the live words as they are."""
        await self._serve(lambda: self.version)

    async def save(self) -> None:
        """Copy the held version to disk if that is due."""
        # On the way back to a newer version, the disk may hold what was served before.
        if self.version.number >= self._newest_served:
            await asyncio.to_thread(self._saved.compact, self.version, self._weights.live)

    def lose(self) -> None:
        """Note that the live words are the base model's, or soon will be; ``restore`` has to follow."""
        self._is_lost = True

    async def restore(self) -> None:
        """Continue from the newest version on disk.

        Raises:
            StartupError: the disk cannot be used.
        """

        def change() -> PolicyVersion:
            self.version, _ = self._saved.load(self._weights, base=self.base)
            self._scrub.expect_current(self._weights.live)
            self._is_lost = False
            return self.version

        await self._serve(change, restores=True)

    async def repair(self, manifest: Manifest, frames: Sequence[tuple[FrameSpan, Words]]) -> None:
        """Replace the words of some frames, and serve the manifest's version if all of it is then right.

        Raises:
            RefusedError: DAMAGED; nothing is served.
        """

        def change() -> PolicyVersion:
            for span, words in frames:
                self._weights.live.write(span, words)
            self._weights.settle()
            digests = frame_digests(self._weights.live, self._layout.frames)
            if version_root(self._layout.digest, digests) != manifest.root:
                raise RefusedError(
                    Reason.DAMAGED, f"version {manifest.version} was repaired and is still not as signed"
                )
            self.version = manifest.policy_version
            self._scrub.expect(digests)
            return self.version

        await self._serve(change)

    async def begin_again(self, *, is_head: bool) -> None:
        """Go back to the base model; serve it only if it ``is_head``."""

        def change() -> PolicyVersion | None:
            copy_words(self.base.words, self._weights.live, layout=self._layout)
            self._weights.settle()
            self.version = self.base.version
            self._scrub.expect_current(self._weights.live)
            self._is_lost = False
            return self.version if is_head else None

        async with self._is_changing:
            await self._hand_over(change)

    async def check_next_frames(self) -> int | None:
        """Hash some of the live words again; return a frame that is not what was verified, else None."""
        async with self._is_changing:
            if self._is_lost:
                return None
            try:
                return await asyncio.to_thread(self._scrub.check_next, self._weights.live)
            except EngineEndedError:
                return None  # the engine's thread finds out by itself

    def damaged_frames(self, manifest: Manifest) -> list[int]:
        """Return the frames of the live words that are not as the manifest says. Reads all of them."""
        live, frames = self._weights.live, zip(manifest.frames, self._layout.frames, strict=True)
        return [
            number
            for number, (record, span) in enumerate(frames)
            if not record.makes(words_digest(live.read(span)))
        ]

    def admit(self, manifest: Manifest) -> StoreMark:
        """Return the mark after believing a manifest. Versions on the way to the head leave it unchanged.

        Raises:
            RefusedError: FENCED or ROLLBACK.
        """
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

    async def _serve(self, change: Callable[[], PolicyVersion], *, restores: bool = False) -> None:
        """Hand a change over, and sample from the version it makes.

        Raises:
            RefusedError: what ``change`` raised, or DAMAGED if it starts from words that are lost; nothing is
                served any more.
        """

        def serving() -> PolicyVersion | None:
            if self._is_lost and not restores:
                raise RefusedError(Reason.DAMAGED, "the engine was loaded again and has the base model")
            version = change()
            # After a doubt, versions older than the one that was served are not sampled from.
            return version if version.number >= self._newest_served else None

        async with self._is_changing:
            version = await self._hand_over(serving)
        if version is not None:
            self._newest_served = version.number
            logger.info("version held", extra={"version": version.number, "root": version.root.hex()})
