"""Masters -> signed artifacts in the learner's store, from where they are uploaded.

    masters --a version--> one pass over them, on all cores --> store --> uploader, in its own time
                                     |
              a delta from the version published last; then, as ``further_artifacts`` says, a keyframe,
              or deltas over many versions while no newer version waits

The pass goes frame by frame: round to words, compare, code, hash, write the payload. Training goes on
meanwhile until it would write the masters. Where words are, and how much memory they take, is the coder's
business: see ``learner.masters.version_coder``.

A version that a full disk refused is tried again until there is room or a newer version: without it, samplers
may have nothing fresh enough to train on.

A version that changes no published word is not published, so that samplers need not swap. But staleness is
counted in version numbers, so one is published all the same once what is published is a quarter of the
staleness bound behind by number, at the end, and after a rollback, since older groups are refused then.

After a restart the words published last are rebuilt from the store, whatever the masters are by then: the
next version is a delta from them. If the store does not have them any more, it is a keyframe.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Final

from learner.masters.master_access import MasterAccess
from learner.masters.version_coder import VersionCoder
from learner.metrics import Instruments
from learner.publishing.further_artifacts import FurtherArtifacts
from learner.publishing.starting_point import newest_published, take_up
from node.errors import Reason, RefusedError
from node.system.waits import run_until
from node.values.policy import NO_BASE, ArtifactKey, PolicyVersion
from node.values.run import RunSettings
from node.weights.assembly.encode import CodedFrame, join
from node.weights.format.digests import version_root
from node.weights.format.manifest import signed_by
from node.weights.store.artifact_files import Draft, disk_errors_refused

logger = logging.getLogger(__name__)

UNCHANGED_SHARE: Final = 4
"""Version numbers may run ahead of what is published by a quarter of the staleness bound: leases of samplers
that hold the same words under an older number are bounded as if the words were older."""


class Publisher:
    """A service that publishes the newest version whenever there is a new one."""

    name = "publisher"

    def __init__(
        self,
        access: MasterAccess,
        coder: VersionCoder,
        further: FurtherArtifacts,
        *,
        before_keyframe: Callable[[], None],
        run_settings: Callable[[], Awaitable[RunSettings]],
        oldest_usable_version: Callable[[], int],
        leaves_out_unchanged: bool = True,
        instruments: Instruments,
    ) -> None:
        """Publish the versions after the newest in the store, the one that the masters hold now among them.

        Args:
            coder: from now on reads masters only between ``access.take`` and ``access.release``.
            further: of the store and the key to publish with.
            before_keyframe: called in the publishing thread before a keyframe lets the store forget versions.
            run_settings: waits until the learner has joined.
            oldest_usable_version: returns the version from which on groups are trained on. Any thread.
            leaves_out_unchanged: whether a version that changes no word may stay unpublished. Contributors
                wait for the version that has their change, whatever its words.
        """
        self._access = access
        self._coder = coder
        self._further = further
        self._stored, self._store, self._signer = further.stored, further.stored.store, further.signer
        self._run_settings = run_settings
        self._disk_wait = instruments.disk_wait
        self._clock = instruments.clock
        self._metrics = instruments.metrics
        self._unchanged_versions = 0
        self._unchanged_share = 1 / UNCHANGED_SHARE if leaves_out_unchanged else 0.0
        self._before_keyframe = before_keyframe
        self._oldest_usable_version = oldest_usable_version
        self._base: PolicyVersion | None = None
        """The version that the coder has as published."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publishing")

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Publish until ``stopping``, then publish what still waits.

        Raises:
            StartupError: the run is ahead of this learner, or on another branch.
            RefusedError: NON_FINITE, if a version holds a NaN or an infinity.
        """
        try:
            settings = await self._run_settings()
            self._unchanged_versions = int(settings.max_staleness_versions * self._unchanged_share)
            await self._begin(settings.head)
            ready()
            while True:
                number = self._access.take()
                if number is not None:
                    await self._publish_masters(number, stopping)
                elif stopping.is_set():
                    return
                elif not await self._catch_others_up(stopping):
                    await run_until(stopping, self._access.wait_for_version())
        finally:
            self._access.give_up()
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._coder.close()

    async def _begin(self, run_head: PolicyVersion | None) -> None:
        published = newest_published(self._store.head(), run_head, learner_version=self._access.version)
        self._base = await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: take_up(self._coder, self._stored, published)
        )
        number = 0 if published is None else published.number
        self._metrics.published_version.set(number)
        if self._access.version > number:
            self._access.put_back()

    async def _publish_masters(self, number: int, stopping: asyncio.Event) -> None:
        """Publish what the masters hold; after a full disk, what they hold by then."""
        taken: int | None = number

        async def publish() -> bool:
            nonlocal taken
            taken = self._access.take() if taken is None else taken
            if taken is not None:
                version, taken = taken, None
                if self._base is not None and self._base.number == version:
                    self._access.release()
                    return True
                try:
                    await self._publish(version, partial(self._make_version, version))
                except RefusedError as refused:
                    if refused.reason is not Reason.DISK and refused.reason.is_retryable:
                        fields = {"version": version, "error": str(refused)}
                        logger.error("publishing failed", extra=fields)
                        return False
                    if not stopping.is_set():
                        self._access.put_back()
                    raise
            return True

        await self._disk_wait.until_written(f"version {number}", publish, stopping=stopping)

    async def _publish(self, number: int, make: Callable[[], PolicyVersion | None]) -> None:
        started_s = self._clock.monotonic()
        self._metrics.superseded_versions.inc(self._access.take_superseded())
        # If it fails, the next try or version starts from the same base.
        version = await asyncio.get_running_loop().run_in_executor(self._thread, make)
        if version is None:
            self._metrics.unchanged_versions.inc()
            logger.info("version changes no published word", extra={"version": number})
            return
        self._base = version
        took_s = self._clock.monotonic() - started_s
        self._access.newest_published = (number, took_s)
        self._metrics.published_version.set(number)
        self._metrics.publish_seconds.observe(took_s)
        fields = {"version": number, "root": version.root.hex(), "took_s": took_s}
        logger.info("published", extra=fields)
        if self._further.is_keyframe_due(number):
            await self._add_keyframe(version)

    async def _add_keyframe(self, version: PolicyVersion) -> None:
        """Store a published version as a keyframe too; if the disk is full, a later one will do."""
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self._store_keyframe(version)
            )
        except RefusedError as refused:
            if not refused.reason.is_retryable:
                raise
            fields = {"version": version.number, "error": str(refused)}
            logger.error("keyframe not stored", extra=fields)

    async def _catch_others_up(self, stopping: asyncio.Event) -> bool:
        """Make one catch-up delta, unless a newer version comes first; False if none is due."""
        key = None if self._base is None else self._further.next_delta(self._base.number)
        if self._base is None or key is None:
            return False
        loop = asyncio.get_running_loop()

        def is_superseded() -> bool:
            return self._access.has_unread or stopping.is_set()

        make = partial(self._further.make_delta, self._coder, self._base, key, is_superseded=is_superseded)
        await loop.run_in_executor(self._thread, make)
        return True

    def _make_version(self, number: int) -> PolicyVersion | None:
        """Read the masters, code and store them; None: they change no word. In the thread."""
        base = self._base
        with ExitStack() as stack:
            try:
                draft = stack.enter_context(self._store.draft())
                coded = self._coder.code_masters(draft.append)
            finally:
                self._access.release()
            if base is not None and self._may_stay(number, base, coded):
                return None
            version = self._store_artifact(number, coded, base=base, draft=draft)
        self._coder.keep()
        return version

    def _may_stay(self, number: int, base: PolicyVersion, coded: Sequence[CodedFrame]) -> bool:
        """Whether samplers may go on with ``base``, which has the same words under an older number."""
        if self._access.is_last or number - base.number > self._unchanged_versions:
            return False
        if base.number < self._oldest_usable_version():
            return False
        return version_root(self._coder.layout.digest, [frame.digest for frame in coded]) == base.root

    def _store_keyframe(self, version: PolicyVersion) -> None:
        """Store the published version; in the thread."""
        with self._store.draft() as draft:
            coded = self._coder.code_published(draft.append)
            self._store_artifact(version.number, coded, base=None, draft=draft)

    def _store_artifact(
        self, number: int, coded: Sequence[CodedFrame], *, base: PolicyVersion | None, draft: Draft
    ) -> PolicyVersion:
        if base is None:
            with disk_errors_refused(ArtifactKey(number, NO_BASE)):
                self._before_keyframe()
        manifest = join(
            coded,
            version=number,
            base=base,
            layout=self._coder.layout,
            run_id=self._signer.run_id,
            learner_epoch=self._signer.learner_epoch,
            published_at_s=self._clock.now(),
        )
        self._store.put_version(signed_by(manifest, self._signer.key), draft)
        return manifest.policy_version
