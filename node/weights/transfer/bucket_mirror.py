"""Keeps a hub's bucket like its store: every complete artifact, once, until retention removes it.

    store --changed--> put what the bucket lacks, newest first -----.
      |                delete what the store has no more            |--> in_bucket, addresses
      '-- every LOOK_AGAIN_S, after a failure --> list the bucket --'

There is no queue that could overflow or be lost: the work is the difference between two listings, each at
most as long as an announcement. Keyframes and deltas are put side by side, so that no step waits behind a
whole model.

A new artifact is announced when it is in the bucket, so that the first copy does not share the hub's uplink
with its readers. It is withheld for ``longest_hold_s`` at most, and not at all while the bucket is away or
was late the last time.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from node.errors import Reason, RefusedError
from node.system.backoff import Backoff
from node.system.listeners import Listener, Listeners
from node.system.waits import run_until, side_by_side, wait_at_most
from node.telemetry.transfer_metrics import TransferMetrics
from node.values import limits
from node.values.policy import Announcement, Artifact, ArtifactKey
from node.weights.format.manifest import Manifest
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.bucket import Bucket, BucketError, object_name
from node.weights.transfer.payload_order import fetch_order

logger = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 60.0
"""How long a bucket may have lost something unnoticed. Peers fetch it from the hub meanwhile."""

ADDRESS_S: Final = 3600.0
"""For how long a signed address holds. Who has it can read one artifact."""

SIGN_EVERY_S: Final = 60.0
"""For how long an address is handed out: a machine's role signs for no longer than its session lasts."""

HOLD_S: Final = 2.0
HOLD_BYTES_PER_S: Final = 50e6
MOST_HOLD_S: Final = 60.0
"""An artifact is withheld for two seconds and for its time at 400 Mbit/s, at most for a minute."""

BLOCK_BYTES: Final = 1 << 20
"""Payloads handed to the bucket at a time, about."""


@dataclass(frozen=True, slots=True)
class _Address:
    url: str
    ends_s: float


def longest_hold_s(size_bytes: int) -> float:
    """Return for how long an artifact may be withheld from the announcement."""
    return min(HOLD_S + size_bytes / HOLD_BYTES_PER_S, MOST_HOLD_S)


class BucketMirror:
    """A service; ready at once. Used on the event loop's thread."""

    name = "bucket"

    def __init__(
        self,
        store: ArtifactStore,
        bucket: Bucket,
        *,
        metrics: TransferMetrics,
        monotonic: Callable[[], float],
        random: Callable[[], float],
        look_again_s: float = LOOK_AGAIN_S,
        hold_s: Callable[[int], float] = longest_hold_s,
    ) -> None:
        """Mirror ``store``, all of it, into ``bucket``; withhold artifacts for ``hold_s`` of their bytes."""
        self._store = store
        self._bucket = bucket
        self._metrics = metrics
        self._monotonic = monotonic
        self._random = random
        self._look_again_s = look_again_s
        self._hold_s = hold_s
        self._is_up = False
        """Whether the bucket did the last thing it was asked to."""
        self._was_late = False
        """Whether the last artifact that was large enough to be withheld took longer than it may be."""
        self._due_s: dict[ArtifactKey, float] = {}
        """Artifact that is withheld -> when it is announced at the latest; written by the store's threads."""
        self._wanted: Mapping[str, Artifact] = {}
        """Name -> artifact: what the store has."""
        self._held: dict[str, int] | None = None
        """Name -> bytes: what the bucket has; None: not listed yet."""
        self._listed_at_s = float("-inf")
        self._in_bucket: dict[ArtifactKey, str] = {}
        """Artifact of the store that can be read from the bucket -> name."""
        self._addresses: dict[str, _Address] = {}
        self._changes = Listeners()
        self._wakes: list[asyncio.Event] = []
        metrics.watch_bucket(
            missing_artifacts=lambda: len(self._wanted) - len(self._in_bucket),
            withheld_artifacts=lambda: len(self._due_s),
        )

    def announced(self, announcement: Announcement) -> Announcement:
        """Return an announcement of the store with what of it is in the bucket."""
        keys = tuple(a.key for a in announcement.artifacts if a.key in self._in_bucket)
        return replace(announcement, in_bucket=keys)

    def listening(self, listener: Listener) -> AbstractContextManager[None]:
        """Call ``listener`` at each change of what is in the bucket."""
        return self._changes.listening(listener)

    async def locate(self, key: ArtifactKey) -> tuple[str, float]:
        """Return an address of an artifact's object, and the seconds for which it holds.

        Raises RefusedError: UNKNOWN_VERSION: the bucket does not have it. BUSY: nothing can be signed now.
        """
        name = self._in_bucket.get(key)
        if name is None:
            what = f"version {key.version} from {key.base_version} is not in the bucket"
            raise RefusedError(Reason.UNKNOWN_VERSION, what, fix="fetch it from the hub")
        now = self._monotonic()
        known = self._addresses.get(name)
        if known is None or known.ends_s - now < ADDRESS_S - SIGN_EVERY_S:
            try:
                url = await self._bucket.address(name, valid_s=ADDRESS_S)
            except BucketError as error:
                self._failed("sign", error)
                what = "the bucket's addresses cannot be signed now"
                raise RefusedError(Reason.BUSY, what, fix="fetch from the hub") from error
            known = self._addresses[name] = _Address(url, now + ADDRESS_S)
        return known.url, known.ends_s - now

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Mirror until ``stopping``; what is being put then is put by the next process."""
        loop = asyncio.get_running_loop()
        waking = self._store.listening(lambda: loop.call_soon_threadsafe(self._wake))
        with waking, self._store.withholding(self._withholds):
            ready()
            await run_until(stopping, self._keep())

    async def _keep(self) -> None:
        async with side_by_side() as group:
            group.create_task(self._release_in_time())
            group.create_task(self._repeat("list", self._tidy))
            group.create_task(self._repeat("put", partial(self._put_next, is_keyframe=False)))
            group.create_task(self._repeat("put", partial(self._put_next, is_keyframe=True)))

    async def _repeat(self, operation: str, turn: Callable[[], Awaitable[bool]]) -> None:
        """Take turns until one has nothing to do, and again at each change; after a failure, back off."""
        changed, backoff = asyncio.Event(), Backoff(self._random)
        self._wakes.append(changed)
        while True:
            changed.clear()
            try:
                while await turn():
                    backoff.reset()
            except (BucketError, RefusedError) as error:
                self._failed(operation, error)
                self._is_up, self._listed_at_s = False, float("-inf")
                self._wake()
                await backoff.wait()
            else:
                backoff.reset()
                await wait_at_most(changed, self._look_again_s)

    def _withholds(self, artifact: Artifact) -> bool:
        if not self._is_up or self._was_late or artifact.size_bytes <= limits.DIRECT_BYTES:
            return False
        self._due_s[artifact.key] = self._monotonic() + self._hold_s(artifact.size_bytes)
        return True

    async def _release_in_time(self) -> None:
        """Release what has been withheld for long enough; everything, once the bucket has failed."""
        changed = asyncio.Event()
        self._wakes.append(changed)
        while True:
            changed.clear()
            now = self._monotonic()
            late = [key for key, due_s in tuple(self._due_s.items()) if due_s <= now]
            if late:
                self._was_late = True
                logger.warning("the bucket is slow; versions are announced without it")
            await self._release(late if self._is_up else tuple(self._due_s))
            next_s = min(tuple(self._due_s.values()), default=None)
            await wait_at_most(changed, None if next_s is None else max(0.0, next_s - self._monotonic()))

    async def _release(self, keys: Iterable[ArtifactKey]) -> None:
        for key in keys:
            if self._due_s.pop(key, None) is not None:
                try:
                    await asyncio.to_thread(self._store.release, key)
                except RefusedError as refused:
                    logger.warning("artifact not announced yet", extra={"detail": str(refused)})

    async def _tidy(self) -> bool:
        """List the bucket if that is due, and delete what is not wanted any more."""
        if self._monotonic() - self._listed_at_s >= self._look_again_s:
            before = frozenset(self._held or ())
            listed = await self._bucket.listing()
            # What was put meanwhile may be missing from the listing.
            since = {} if self._held is None else self._held
            self._held = listed | {name: size for name, size in since.items() if name not in before}
            self._listed_at_s = self._monotonic()
            self._is_up = True
            self._wake()
        await self._look()
        assert self._held is not None
        surplus = self._held.keys() - self._wanted
        if surplus:
            await self._bucket.delete(surplus)
            self._held = {name: size for name, size in self._held.items() if name not in surplus}
            await self._look()  # one that was repaired in the store meanwhile is put again
            self._wake()
        return False

    async def _put_next(self, *, is_keyframe: bool) -> bool:
        """Put the newest artifact that the bucket lacks, of this kind; return whether there was one."""
        if self._held is None:
            return False
        await self._look()
        lacking = {
            name: artifact
            for name, artifact in self._wanted.items()
            if artifact.key.is_keyframe == is_keyframe and artifact.key not in self._in_bucket
        }
        if not lacking:
            return False
        name = max(lacking, key=lambda name: lacking[name].key)
        artifact = lacking[name]
        try:
            with self._store.lease(artifact.key):
                manifest = await asyncio.to_thread(self._store.manifest, artifact.key)
                if object_name(manifest) == name:
                    began_s = self._monotonic()
                    await self._bucket.put(name, self._blocks(manifest), size_bytes=artifact.size_bytes)
                    self._held[name] = artifact.size_bytes
                    if artifact.size_bytes > limits.DIRECT_BYTES:
                        self._was_late = self._monotonic() - began_s > self._hold_s(artifact.size_bytes)
        except RefusedError as refused:
            if refused.reason is not Reason.UNKNOWN_VERSION:
                raise
            # Removed meanwhile, and so not wanted any more.
        await self._look()
        if name not in self._wanted:
            self._wake()
        return True

    async def _blocks(self, manifest: Manifest) -> AsyncIterator[bytes]:
        """Yield an artifact's payloads in the order in which they are fetched, verified."""
        block = bytearray()
        for frame in fetch_order(manifest, range(len(manifest.frames))):
            if manifest.frames[frame].payload_bytes:
                block += await asyncio.to_thread(self._store.read_payload, manifest.key, frame)
            if len(block) >= BLOCK_BYTES:
                self._metrics.count_bucket_bytes("out", len(block))
                yield bytes(block)
                block.clear()
        self._metrics.count_bucket_bytes("out", len(block))
        if block:
            yield bytes(block)

    async def _look(self) -> None:
        """Compare what is wanted with what is held; tell the listeners of a change."""
        self._wanted = await asyncio.to_thread(self._stored)
        held = self._held or {}
        in_bucket = {a.key: name for name, a in self._wanted.items() if held.get(name) == a.size_bytes}
        if in_bucket != self._in_bucket:
            self._in_bucket, names = in_bucket, set(in_bucket.values())
            self._addresses = {name: a for name, a in self._addresses.items() if name in names}
            self._changes.notify()
        await self._release(in_bucket)

    def _stored(self) -> dict[str, Artifact]:
        """Return the artifacts of the store by the names of their objects; empty ones need none."""
        return {object_name(m): m.artifact for m in self._store.whole() if m.size_bytes}

    def _wake(self) -> None:
        for event in self._wakes:
            event.set()

    def _failed(self, operation: str, error: Exception) -> None:
        self._metrics.count_bucket_failure(operation)
        logger.warning("the bucket failed; it is tried again", extra={"detail": str(error)})
