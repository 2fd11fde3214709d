"""Keeps a relay's store like that of its upstream: newest first, one artifact at a time.

    announced upstream -> plan_upload(upstream, own, head) -> manifest -> offer -> missing frames -> store
             ^                                                                                         |
             `------- announced again, line cut, damaged or removed here: what is missing is planned anew

The plan is the one a learner uploads by: first what moves this relay to the head, then the newest
keyframe for late joiners, then the rest. What is under way stays on disk when something more
urgent is announced, and is gone on with later.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from node.errors import CountRefusal, Reason, RefusedError
from node.policy import Announcement, Artifact, ArtifactKey
from node.rpc.channel import Backoff, ConnectionLost
from node.waits import run_until
from node.weights.assembly.apply import DamagedFrameError
from node.weights.planning.chain import PUBLIC_VERSION, plan_upload
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.fetch import Fetcher

logger = logging.getLogger(__name__)


class Mirror:
    """A service; ready at once, because what was mirrored before is served meanwhile."""

    name = "mirror"

    def __init__(
        self,
        store: ArtifactStore,
        fetcher: Fetcher,
        *,
        watch: Callable[[], AsyncIterator[Announcement]],
        count_refusal: CountRefusal,
        random: Callable[[], float],
    ) -> None:
        """Mirror into ``store``; ``watch`` gives announcements for as long as anyone listens."""
        self._store = store
        self._fetcher = fetcher
        self._watch = watch
        self._count_refusal = count_refusal
        self._backoff = Backoff(random)
        self._changed = asyncio.Event()
        self._upstream: Announcement | None = None
        self._unwanted: set[ArtifactKey] = set()
        """What this store will not have, until something else is announced."""

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Mirror until ``stopping``.

        Raises:
            RefusedError: upstream will never announce anything to this relay.
        """
        loop = asyncio.get_running_loop()
        with self._store.listening(lambda: loop.call_soon_threadsafe(self._changed.set)):
            ready()
            await run_until(stopping, self._follow())

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            while True:
                self._changed.clear()
                wanted = await self._wanted()
                if wanted is None:
                    head = PUBLIC_VERSION if self._upstream is None else self._upstream.head.number
                    self._fetcher.expect(head, tasks)
                    await self._changed.wait()
                else:
                    await self._copy_unless_late(wanted)

    async def _listen(self) -> None:
        async for announcement in self._watch():
            self._upstream = announcement
            self._unwanted.clear()
            self._changed.set()

    async def _wanted(self) -> Artifact | None:
        if self._upstream is None:
            return None
        own = await asyncio.to_thread(self._store.whole)
        offered = [artifact for artifact in self._upstream.artifacts if artifact.key not in self._unwanted]
        return next(iter(plan_upload(offered, remote=own, head=self._upstream.head.number)), None)

    async def _copy_unless_late(self, wanted: Artifact) -> None:
        """Copy an artifact, or as much of it as arrives before another one is more urgent."""
        copying = asyncio.create_task(self._copy(wanted.key))
        try:
            while not copying.done():
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({copying, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._changed.clear()
                if not copying.done() and await self._wanted() != wanted:
                    return
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
        copying.result()

    async def _copy(self, key: ArtifactKey) -> None:
        try:
            manifest, signed = await self._fetcher.signed_manifest(key)
            _, missing = await asyncio.to_thread(self._store.offer, signed)
            await asyncio.to_thread(self._store.set_arriving, key, True)
            try:
                await self._fetcher.fetch(manifest, missing, lambda frame, data: self._put(key, frame, data))
            finally:
                await asyncio.to_thread(self._store.set_arriving, key, False)
        except ConnectionLost as lost:
            logger.info("mirroring interrupted", extra={"artifact": str(key), "detail": str(lost)})
            await self._backoff.wait(self._changed)
        except RefusedError as refused:
            self._count_refusal(service="PolicyService", reason=refused.reason)
            logger.warning("artifact not mirrored", extra={"artifact": str(key), "detail": str(refused)})
            if refused.reason is Reason.DISK:
                await self._backoff.wait()
            else:
                self._unwanted.add(key)
        else:
            self._backoff.reset()
            logger.info("mirrored", extra={"version": key.version, "base_version": key.base_version})

    def _put(self, key: ArtifactKey, frame: int, payload: bytes) -> None:
        try:
            self._store.write_frame(key, frame, payload)
        except RefusedError as refused:
            if refused.reason is Reason.DAMAGED:
                raise DamagedFrameError(frame, str(refused)) from refused
            raise
