"""Keeps a store of policy versions like that of its upstream: newest first, one artifact at a time.

    announced upstream -> next_artifact() -> manifest -> offer -> missing frames -> store
             ^                                                                        |
             `---- announced again, link cut, damaged or removed here: plan again ----'

The plan (``mirror_state``) is the one a learner uploads by: first what moves this store to the head, then the
newest keyframe for late joiners, then the rest. What does not move the head makes way for what does, as soon
as the frames begun are whole; it stays on disk, and is continued later.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from node.errors import CountRefusal, Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import Backoff
from node.system.waits import run_until, while_it_may
from node.values.policy import Announcement, Artifact, ArtifactKey
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.mirror_state import MirrorState

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
        """Mirror into ``store``; ``watch`` yields announcements for as long as anyone listens."""
        self._store = store
        self._fetcher = fetcher
        self._watch = watch
        self._count_refusal = count_refusal
        self._backoff = Backoff(random)
        self._changed = asyncio.Event()
        self._state = MirrorState()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Mirror until ``stopping``.

        Raises RefusedError: upstream will never announce anything to this peer.
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
                artifact = await self._fetcher.next_artifact(self._look, tasks)
                if artifact is None:
                    self._fetcher.prefetch(self._state.head_version, tasks)
                    await self._changed.wait()
                else:
                    await self._copy_while_urgent(artifact)

    async def _listen(self) -> None:
        async for announcement in self._watch():
            self._state = self._state.announced(announcement)
            self._changed.set()

    async def _look(self) -> MirrorState:
        own = await asyncio.to_thread(self._store.whole)
        retained = await asyncio.to_thread(self._store.retained)
        head = self._store.head()
        self._state = replace(
            self._state,
            own=tuple(manifest.artifact for manifest in own),
            retained=retained,
            newest=None if head is None else head.number,
        )
        return self._state

    async def _copy_while_urgent(self, artifact: Artifact) -> None:
        """Copy an artifact, or as much of it as is begun before another one is more urgent."""
        is_urgent = artifact.key.version > self._state.held_version or artifact in self._state.path()

        async def may_go_on() -> bool:
            if not is_urgent and (await self._look()).path():
                self._fetcher.wind_up()
            return True

        await while_it_may(self._copy(artifact.key), changed=self._changed, may_go_on=may_go_on)

    async def _copy(self, key: ArtifactKey) -> None:
        try:
            manifest = await self._fetcher.manifest(key)
            missing = await asyncio.to_thread(self._store.offer, manifest)
            await asyncio.to_thread(self._store.set_arriving, key, True)
            try:
                is_whole = await self._fetcher.fetch(manifest, missing, partial(self._store.write_frame, key))
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
                self._state = self._state.refused(key)
        else:
            self._backoff.reset()
            if is_whole:
                logger.info("mirrored", extra={"version": key.version, "base_version": key.base_version})
