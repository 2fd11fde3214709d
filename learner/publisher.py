"""Snapshots -> signed artifacts in the learner's store, from where they are uploaded.

    mailbox --newest snapshot--> code and sign (thread) --> store --> uploader, in its own time
                                     |
              a delta from the version published last, and a keyframe every so many versions;
              while no snapshot waits, deltas over many versions (learner/catch_up.py)

After a restart the version of the checkpoint is published again, as a keyframe, unless it is the
newest in the store: what was published last is then known to the word.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from learner.catch_up import CatchUp, Signer
from learner.mailbox import Snapshot, SnapshotMailbox
from learner.metrics import LearnerMetrics
from node.clock import Clock
from node.errors import RETRYABLE, RefusedError, StartupError
from node.policy import PolicyVersion
from node.run import RunSettings
from node.until import run_until
from node.weights.digests import Words
from node.weights.encode import encode_version
from node.weights.held import HeldPolicy
from node.weights.layout import Layout
from node.weights.manifest import sign
from node.weights.store import ArtifactStore

_log = logging.getLogger(__name__)


class Publisher:
    """A service that publishes the newest snapshot there is, for as long as there are any."""

    name = "publisher"

    def __init__(
        self,
        mailbox: SnapshotMailbox,
        store: ArtifactStore,
        *,
        start: HeldPolicy,
        layout: Layout,
        signer: Signer,
        keyframe_every_versions: int,
        catch_up: CatchUp,
        run_settings: Callable[[], Awaitable[RunSettings]],
        clock: Clock,
        metrics: LearnerMetrics,
    ) -> None:
        """Publish what comes after ``start``, the version that training begins or goes on with.

        Args:
            start: its words belong to the publisher from now on.
            run_settings: waits until the learner has joined.
        """
        self._mailbox = mailbox
        self._store = store
        self._start = start
        self._layout = layout
        self._signer = signer
        self._keyframe_every_versions = keyframe_every_versions
        self._catch_up = catch_up
        self._run_settings = run_settings
        self._clock = clock
        self._metrics = metrics
        self._base: HeldPolicy | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publishing")

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Publish until ``stopping``, then what is still waiting.

        Raises:
            StartupError: the run is further than this learner's checkpoint, or on another branch.
            RefusedError: NON_FINITE, if a version holds a NaN or an infinity.
        """
        try:
            await self._begin((await self._run_settings()).head)
            ready()
            while True:
                snapshot = self._mailbox.take()
                if snapshot is not None:
                    await self._publish(snapshot)
                elif stopping.is_set():
                    return
                elif not await self._catch_others_up(stopping):
                    await run_until(stopping, self._mailbox.wait_for_snapshot())
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _begin(self, hub_head: PolicyVersion | None) -> None:
        announcement = self._store.announcement()
        own_head = None if announcement is None else announcement.head
        for head in (own_head, hub_head):
            if head is not None:
                _check_continues(self._start.version, head)
        if self._start.version.number == 0 or self._start.version == own_head:
            self._hold(self._start.version, self._start.words)
        else:
            await self._publish(
                Snapshot(self._start.version.number, self._start.words, taken_at_s=self._clock.monotonic())
            )

    async def _publish(self, snapshot: Snapshot) -> None:
        loop = asyncio.get_running_loop()
        self._metrics.superseded_snapshots.inc(self._mailbox.take_superseded())
        try:
            version = await loop.run_in_executor(self._thread, self._code_and_store, snapshot)
        except RefusedError as refused:
            if refused.reason not in RETRYABLE:
                raise
            # The next snapshot starts from the same base; this one is lost to freshness only.
            _log.error("publishing failed", extra={"version": snapshot.version, "error": str(refused)})
            self._mailbox.give_back(snapshot.words)
            return
        self._hold(version, snapshot.words)
        took_s = self._clock.monotonic() - snapshot.taken_at_s
        self._metrics.publish_seconds.observe(took_s)
        told = {"version": version.number, "root": version.root.hex(), "took_s": took_s}
        _log.info("published", extra=told)

    async def _catch_others_up(self, stopping: asyncio.Event) -> bool:
        """Make one delta over many versions, or as much of it as time allows; False if none is wanted."""
        key = None if self._base is None else self._catch_up.next_key(self._base.version.number)
        if self._base is None or key is None:
            return False
        loop = asyncio.get_running_loop()

        def is_superseded() -> bool:
            return self._mailbox.is_filled or stopping.is_set()

        make = partial(self._catch_up.make, self._base, key, is_superseded=is_superseded)
        await loop.run_in_executor(self._thread, make)
        return True

    def _hold(self, version: PolicyVersion, words: Words) -> None:
        if self._base is not None:
            self._mailbox.give_back(self._base.words)
        self._base = HeldPolicy(version, words)
        self._metrics.published_version.set(version.number)

    def _code_and_store(self, snapshot: Snapshot) -> PolicyVersion:
        """Make one or two artifacts visible in the store; in the thread."""
        version = self._store_artifact(snapshot, base=self._base)
        since_keyframe = snapshot.version - self._newest_keyframe()
        if self._base is not None and since_keyframe >= self._keyframe_every_versions:
            self._store_artifact(snapshot, base=None)
        return version

    def _store_artifact(self, snapshot: Snapshot, *, base: HeldPolicy | None) -> PolicyVersion:
        encoded = encode_version(
            snapshot.words,
            version=snapshot.version,
            base=base,
            layout=self._layout,
            run_id=self._signer.run_id,
            learner_epoch=self._signer.learner_epoch,
            published_at_s=self._clock.now(),
        )
        self._store.put_version(sign(encoded.manifest, self._signer.key), encoded.payloads)
        return encoded.manifest.policy_version

    def _newest_keyframe(self) -> int:
        """Give the newest version that needs nothing but itself; the public base model is version 0."""
        announcement = self._store.announcement()
        artifacts = () if announcement is None else announcement.artifacts
        return max((a.key.version for a in artifacts if a.key.is_keyframe), default=0)


def _check_continues(start: PolicyVersion, head: PolicyVersion) -> None:
    if head.number > start.number:
        raise StartupError(
            f"The run is at version {head.number}, this learner's newest checkpoint at {start.number}",
            fix="Restore the newest checkpoint, or begin a new run: a version number is never made twice.",
        )
    if head.number == start.number and head.root != start.root:
        raise StartupError(
            f"Version {head.number} of the run has root {head.root.hex()}, this learner's {start.root.hex()}",
            fix="Restore this run's own checkpoint, or begin a new run.",
        )
