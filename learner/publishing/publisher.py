"""Masters -> signed artifacts in the learner's store, from where they are uploaded.

    masters --a version--> one pass over them, on all cores --> store --> uploader, in its own time
                                     |
              a delta from the version published last; then, as ``further_artifacts`` says, a keyframe,
              or deltas over many versions while no newer version waits

The pass goes frame by frame: round to words, compare, code, hash, write the payload. Training goes on
meanwhile until it would write the masters. There are two arrays of words: the version published last and the
one being made. They change places when the artifact is stored, so a pass that fails has changed nothing.
Beyond them, the frames under way bound the memory.

A version that a full disk refused is tried again until there is room or a newer version: without it, samplers
may have nothing fresh enough to train on.

A version that changes no published word is not published, so that samplers need not swap. But staleness is
counted in version numbers, so one is published all the same once what is published is a quarter of the
staleness bound behind by number, and at the end.

After a restart the checkpoint's version is published again as a keyframe, unless it is the newest in the
store: then the words published last are known.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from learner.metrics import Instruments
from learner.publishing.further_artifacts import FurtherArtifacts
from learner.publishing.signer import Signer
from learner.training.master_access import MasterAccess
from learner.training.master_words import MasterWords
from node.errors import Reason, RefusedError, StartupError
from node.policy import PolicyVersion
from node.run import RunSettings
from node.waits import run_until
from node.weights.assembly.encode import CodedFrame, FrameWords, code_frames, join
from node.weights.assembly.held import HeldPolicy
from node.weights.format.digests import Words, version_root
from node.weights.format.manifest import signed_by
from node.weights.store.artifact_files import Draft
from node.weights.store.artifact_store import ArtifactStore

logger = logging.getLogger(__name__)

UNCHANGED_SHARE: Final = 4
"""Version numbers may run ahead of what is published by a quarter of the staleness bound: leases of samplers
that hold the same words under an older number are bounded as if the words were older."""

_UNDER_WAY_PER_THREAD: Final = 2
"""Frames: while one is coded, another may wait for its place in the file."""


class Publisher:
    """A service that publishes the newest version whenever there is a new one."""

    name = "publisher"

    def __init__(
        self,
        access: MasterAccess,
        masters: MasterWords,
        store: ArtifactStore,
        *,
        signer: Signer,
        further: FurtherArtifacts,
        threads: int,
        run_settings: Callable[[], Awaitable[RunSettings]],
        instruments: Instruments,
    ) -> None:
        """Publish the versions after the one that the masters hold now.

        Args:
            masters: from now on read only between ``access.take`` and ``access.release``.
            threads: that share a pass, at least 1.
            run_settings: waits until the learner has joined.
        """
        self._access = access
        self._masters = masters
        self._store = store
        self._layout = masters.layout
        self._signer = signer
        self._further = further
        self._threads = threads
        self._run_settings = run_settings
        self._disk_wait = instruments.disk_wait
        self._clock = instruments.clock
        self._metrics = instruments.metrics
        self._unchanged_versions = 0
        words: Words = np.empty(self._layout.words, np.uint16)
        masters.snapshot(words)
        self._start = HeldPolicy.of(access.version, words, layout=self._layout)
        self._base: HeldPolicy | None = None
        self._spare: Words = np.empty_like(words)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publishing")
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="coding")

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Publish until ``stopping``, then publish what still waits.

        Raises:
            StartupError: the run is ahead of this learner's checkpoint, or on another branch.
            RefusedError: NON_FINITE, if a version holds a NaN or an infinity.
        """
        try:
            settings = await self._run_settings()
            self._unchanged_versions = settings.max_staleness_versions // UNCHANGED_SHARE
            await self._begin(settings.head, stopping)
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
            self._pool.shutdown(wait=False)

    async def _begin(self, run_head: PolicyVersion | None, stopping: asyncio.Event) -> None:
        announcement = self._store.announcement()
        own_head = None if announcement is None else announcement.head
        for head in (own_head, run_head):
            if head is not None:
                _check_continues(self._start.version, head)
        if self._start.version.number == 0 or (own_head and self._start.version.root == own_head.root):
            published = own_head or self._start.version
            self._base = replace(self._start, version=published)
            self._metrics.published_version.set(published.number)
        else:
            number = self._start.version.number
            await self._disk_wait.until_written(
                f"version {number} as a keyframe",
                lambda: self._publish(number, lambda: self._store_keyframe(self._start)),
                stopping=stopping,
            )

    async def _publish_masters(self, number: int, stopping: asyncio.Event) -> None:
        """Publish what the masters hold; after a full disk, what they hold by then."""
        taken: int | None = number

        async def publish() -> bool:
            nonlocal taken
            taken = self._access.take() if taken is None else taken
            if taken is not None:
                version, taken = taken, None
                if self._base is not None and self._base.version.number == version:
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

    async def _publish(self, number: int, make: Callable[[], HeldPolicy | None]) -> None:
        started_s = self._clock.monotonic()
        self._metrics.superseded_versions.inc(self._access.take_superseded())
        # If it fails, the next try or version starts from the same base.
        version = await asyncio.get_running_loop().run_in_executor(self._thread, make)
        if version is None:
            self._metrics.unchanged_versions.inc()
            logger.info("version changes no published word", extra={"version": number})
            return
        if version.words is self._spare:
            self._spare = self._start.words if self._base is None else self._base.words
        self._base = version
        took_s = self._clock.monotonic() - started_s
        self._access.newest_published = (number, took_s)
        self._metrics.published_version.set(number)
        self._metrics.publish_seconds.observe(took_s)
        fields = {"version": number, "root": version.version.root.hex(), "took_s": took_s}
        logger.info("published", extra=fields)
        if self._further.is_keyframe_due(number):
            await self._add_keyframe(version)

    async def _add_keyframe(self, version: HeldPolicy) -> None:
        """Store a published version as a keyframe too; if the disk is full, a later one will do."""
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self._store_keyframe(version)
            )
        except RefusedError as refused:
            if not refused.reason.is_retryable:
                raise
            fields = {"version": version.version.number, "error": str(refused)}
            logger.error("keyframe not stored", extra=fields)

    async def _catch_others_up(self, stopping: asyncio.Event) -> bool:
        """Make one catch-up delta, unless a newer version comes first; False if none is due."""
        key = None if self._base is None else self._further.next_delta(self._base.version.number)
        if self._base is None or key is None:
            return False
        loop = asyncio.get_running_loop()

        def is_superseded() -> bool:
            return self._access.has_unread or stopping.is_set()

        make = partial(self._further.make_delta, self._base, key, is_superseded=is_superseded)
        await loop.run_in_executor(self._thread, make)
        return True

    def _make_version(self, number: int) -> HeldPolicy | None:
        """Read the masters, code and store them; None: they change no word. In the thread."""
        made, base = self._spare, self._base

        def read(frame: int) -> Words:
            words = made[self._layout.frames[frame].slice]
            self._masters.read(frame, words)
            return words

        with ExitStack() as stack:
            try:
                draft = stack.enter_context(self._store.draft())
                coded = self._code(read, base=base, draft=draft)
            finally:
                self._access.release()
            if base is not None and self._may_stay(number, base.version, coded):
                return None
            version = self._store_artifact(number, coded, base=base, draft=draft)
        return HeldPolicy(version, made)

    def _may_stay(self, number: int, base: PolicyVersion, coded: Sequence[CodedFrame]) -> bool:
        """Whether samplers may go on with ``base``, which has the same words under an older number."""
        if self._access.is_last or number - base.number > self._unchanged_versions:
            return False
        return version_root(self._layout.digest, [frame.digest for frame in coded]) == base.root

    def _store_keyframe(self, policy: HeldPolicy) -> HeldPolicy:
        """Store a version that is in memory; in the thread."""
        with self._store.draft() as draft:
            coded = self._code(policy.frame_words(self._layout), base=None, draft=draft)
            self._store_artifact(policy.version.number, coded, base=None, draft=draft)
        return policy

    def _code(self, new: FrameWords, *, base: HeldPolicy | None, draft: Draft) -> tuple[CodedFrame, ...]:
        return code_frames(
            range(len(self._layout.frames)),
            new=new,
            base=None if base is None else base.frame_words(self._layout),
            layout=self._layout,
            put=draft.append,
            executor=self._pool,
            under_way=_UNDER_WAY_PER_THREAD * self._threads,
        )

    def _store_artifact(
        self, number: int, coded: Sequence[CodedFrame], *, base: HeldPolicy | None, draft: Draft
    ) -> PolicyVersion:
        manifest = join(
            coded,
            version=number,
            base=None if base is None else base.version,
            layout=self._layout,
            run_id=self._signer.run_id,
            learner_epoch=self._signer.learner_epoch,
            published_at_s=self._clock.now(),
        )
        self._store.put_version(signed_by(manifest, self._signer.key), draft)
        return manifest.policy_version


def _check_continues(start: PolicyVersion, head: PolicyVersion) -> None:
    if head.number > start.number:
        raise StartupError(
            f"The run is at version {head.number}, this learner's newest checkpoint is at {start.number}",
            fix="Restore the newest checkpoint, or begin a new run: a version number must not be used twice.",
        )
    if head.number == start.number and head.root != start.root:
        raise StartupError(
            f"Version {head.number} of the run has root {head.root.hex()}, this learner's {start.root.hex()}",
            fix="Restore this run's own checkpoint, or begin a new run.",
        )
