"""Follows a head that moves on while one fetches: a sampler with what it holds, a relay with what it stores.

    look -> next_artifact() -> fetch() --> took()
     ^                           |
     '---- dropped: interrupted, or something else is here in half the time it still takes

Near, the next artifact is the first of the cheapest path; far, the one that a source chooses to send. The
decisions are in ``node.weights.planning.pursuit``; here are the fetcher they are about and the clock. For the
event loop's thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar

from node.policy import Announcement, Artifact, ArtifactKey
from node.weights.planning.pursuit import Pursuit
from node.weights.transfer.fetcher import Fetcher

LOOK_AGAIN_S: Final = 0.25
"""How late a fetch that is not worth finishing may be noticed, where nothing is announced."""

T = TypeVar("T")


class Position(Protocol):
    """Where a follower is, and which way the head lies."""

    @property
    def held_version(self) -> int:
        """The newest version it has, which the next delta may start from."""

    @property
    def behind_versions(self) -> int:
        """How far the announced head is ahead of that."""

    def path(self) -> Sequence[Artifact]:
        """Return the cheapest way to the head in bytes; empty where there is none, or none is needed."""

    def next_artifact(self) -> Artifact | None:
        """Return what to fetch now: the first of ``path``, or something less urgent; None: nothing."""

    def can_start(self, key: ArtifactKey) -> bool:
        """Whether an artifact makes something newer than what is held, of what is here."""

    def is_useless(self, key: ArtifactKey) -> bool:
        """Whether the cheapest way to the head does not need what ``key`` makes any more."""


Look = Callable[[], Awaitable[Position]]
"""Returns where the follower is now."""


class HeadPursuit:
    """One fetch after the other."""

    def __init__(self, fetcher: Fetcher, *, monotonic: Callable[[], float]) -> None:
        """Fetch with ``fetcher``, whose progress is on the clock ``monotonic``."""
        self._fetcher = fetcher
        self._monotonic = monotonic
        self._pursuit = Pursuit()

    def distance(self, behind_versions: int, *, bound_versions: int) -> str:
        """Return, for people, how far from the head the link keeps this follower."""
        self._pursuit.link = self._fetcher.link
        return self._pursuit.distance(behind_versions, bound_versions=bound_versions)

    def announced(self, announcement: Announcement) -> None:
        self._pursuit.announced(announcement)

    def took(self) -> None:
        self._pursuit.drops_in_a_row = 0

    async def next_artifact(self, look: Look, tasks: asyncio.TaskGroup) -> Artifact | None:
        """Return what to fetch now; None: nothing.

        On a far link it waits for what a source chooses to send, in a request that ``tasks`` owns.
        """
        position = await look()
        path = position.path()
        self._pursuit.link = self._fetcher.link
        if not path or self._pursuit.keeps_up(path, behind_versions=position.behind_versions):
            return position.next_artifact()
        patience_s = self._pursuit.patience_s
        pushed = await self._fetcher.pushed_artifact(position.held_version, tasks, patience_s=patience_s)
        position = await look()
        if pushed is not None and position.can_start(pushed.key):
            return pushed
        return position.next_artifact()

    async def fetch(
        self,
        artifact: Artifact,
        fetching: Coroutine[Any, Any, T],
        *,
        look: Look,
        changed: asyncio.Event,
        is_interrupted: Callable[[Position], bool],
    ) -> T | None:
        """Return what ``fetching`` of ``artifact`` returns; None: dropped, as something else is here sooner.

        ``look`` is asked at each change, which sets ``changed`` (cleared here), and every LOOK_AGAIN_S;
        ``is_interrupted`` ends the fetch for the follower's own reasons.
        """
        task = asyncio.create_task(fetching)
        try:
            while not task.done():
                change = asyncio.create_task(changed.wait())
                await asyncio.wait({task, change}, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                changed.clear()
                if task.done():
                    break
                position = await look()
                if is_interrupted(position) or self._is_superseded(artifact, position):
                    self._fetcher.give_up()
                    self._pursuit.drops_in_a_row += 1
                    return None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task.result()

    def _is_superseded(self, artifact: Artifact, position: Position) -> bool:
        instead = position.next_artifact()
        if instead is None or instead.key == artifact.key or not position.is_useless(artifact.key):
            return False
        self._pursuit.link = self._fetcher.link
        return not self._pursuit.is_worth_finishing(
            self._fetcher.progress, artifact, instead=instead, now=self._monotonic()
        )
