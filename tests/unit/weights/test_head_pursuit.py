"""Choice of the next fetch over a near or a far link, and of a fetch dropped for another; no network."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from node.policy import Announcement, Artifact, ArtifactKey, PolicyVersion
from node.rpc.channel import ConnectionLost
from node.weights.planning.link_time import FetchProgress, Link
from node.weights.planning.pursuit import MOST_DROPS
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.head_pursuit import HeadPursuit
from support.clock import ManualClock
from support.waiting import until

MB = 1_000_000
DELTA, NEXT_DELTA = Artifact(ArtifactKey(5, 4), MB), Artifact(ArtifactKey(6, 5), MB)
KEYFRAME, PUSHED = Artifact(ArtifactKey(6), 100 * MB), Artifact(ArtifactKey(8, 4), 2 * MB)
NEAR, FAR = Link(0.01, 100 * MB), Link(5.0, 100 * MB)


class LinkOnly(Fetcher):
    """A fetcher without sources: a link as measured, the progress of a fetch, and what is pushed to it."""

    def __init__(self, link: Link, *, pushed: Artifact | None = None) -> None:
        self.link = link
        self.progress = FetchProgress(began_at_s=0.0)
        self.pushed = pushed
        self.patience: list[tuple[int, float]] = []
        """Waits for a push: the version each starts from, seconds."""
        self.given_up = 0

    async def pushed_artifact(
        self, held_version: int, tasks: asyncio.TaskGroup, *, patience_s: float
    ) -> Artifact | None:
        self.patience.append((held_version, patience_s))
        return self.pushed

    def give_up(self) -> None:
        self.given_up += 1


@dataclass
class Here:
    """Where a follower is."""

    held_version: int = 4
    behind_versions: int = 2
    way: tuple[Artifact, ...] = (DELTA, NEXT_DELTA)
    next: Artifact | None = DELTA
    useless: frozenset[ArtifactKey] = frozenset()

    def path(self) -> Sequence[Artifact]:
        return self.way

    def next_artifact(self) -> Artifact | None:
        return self.next

    def can_start(self, key: ArtifactKey) -> bool:
        return key.version > self.held_version and key.base_version == self.held_version

    def is_useless(self, key: ArtifactKey) -> bool:
        return key in self.useless


@dataclass
class Follower:
    """A pursuit on a clock of its own, and what it sees each time it looks."""

    fetcher: LinkOnly
    here: Here = field(default_factory=Here)
    then: list[Here] = field(default_factory=list)
    """Views at later looks, one after the other; the last stays."""
    looks: int = 0
    clock: ManualClock = field(default_factory=ManualClock)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.pursuit = HeadPursuit(self.fetcher, monotonic=self.clock.monotonic)
        for number in (1, 2):  # a version a second
            self.pursuit.announced(Announcement(PolicyVersion(number), 1, 100.0 + number, ()))

    async def look(self) -> Here:
        self.looks += 1
        if self.looks > 1 and self.then:
            self.here = self.then.pop(0)
        return self.here

    async def next_artifact(self) -> Artifact | None:
        async with asyncio.TaskGroup() as tasks:
            return await self.pursuit.next_artifact(self.look, tasks)

    async def forever(self) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return "never"

    async def fetch_forever(self, artifact: Artifact, *, is_interrupted: bool = False) -> str | None:
        """Fetch what never ends, with a change announced at once."""
        self.changed.set()
        async with asyncio.timeout(10):
            return await self.pursuit.fetch(
                artifact,
                self.forever(),
                look=self.look,
                changed=self.changed,
                is_interrupted=lambda _: is_interrupted,
            )


async def test_near_the_head_the_cheapest_path_is_asked_for_by_name() -> None:
    follower = Follower(LinkOnly(NEAR, pushed=PUSHED))
    assert await follower.next_artifact() == DELTA
    assert follower.fetcher.patience == []
    assert follower.looks == 1


async def test_where_no_path_is_needed_what_is_less_urgent_comes_next_however_far_the_link() -> None:
    follower = Follower(LinkOnly(FAR, pushed=PUSHED), Here(way=(), next=KEYFRAME))
    assert await follower.next_artifact() == KEYFRAME
    assert await Follower(LinkOnly(FAR), Here(way=(), next=None)).next_artifact() is None
    assert follower.fetcher.patience == []


async def test_over_a_far_link_the_source_chooses() -> None:
    follower = Follower(LinkOnly(FAR, pushed=PUSHED))
    assert await follower.next_artifact() == PUSHED
    assert follower.fetcher.patience == [(4, 11.0)]  # a second, and two round trips of 5 s


@pytest.mark.parametrize("pushed", [None, PUSHED])
async def test_what_does_not_come_or_starts_from_what_is_no_longer_held_is_asked_for_by_name(
    pushed: Artifact | None,
) -> None:
    """Meanwhile the follower took version 5."""
    moved = Here(held_version=5, behind_versions=1, way=(NEXT_DELTA,), next=NEXT_DELTA)
    follower = Follower(LinkOnly(FAR, pushed=pushed), then=[moved])
    assert await follower.next_artifact() == NEXT_DELTA
    assert follower.looks == 2


async def test_the_distance_is_told_by_the_link_as_measured_last() -> None:
    follower = Follower(LinkOnly(NEAR))
    follower.fetcher.link = FAR
    said = follower.pursuit.distance(7, bound_versions=8)
    assert said == "7 behind, 5 more in a round trip of 5 s, bound 8"


async def test_a_fetch_that_ends_gives_its_result_or_its_error() -> None:
    follower = Follower(LinkOnly(NEAR))

    async def fetching(error: Exception | None) -> str:
        if error is not None:
            raise error
        return "done"

    async def fetch(error: Exception | None) -> str | None:
        return await follower.pursuit.fetch(
            DELTA,
            fetching(error),
            look=follower.look,
            changed=follower.changed,
            is_interrupted=lambda _: True,
        )

    assert await fetch(None) == "done"
    with pytest.raises(ConnectionLost, match="gone"):
        await fetch(ConnectionLost("gone"))
    assert follower.looks == follower.fetcher.given_up == 0


async def test_an_interrupted_fetch_is_over_before_its_drop_is_told() -> None:
    follower = Follower(LinkOnly(NEAR))
    assert await follower.fetch_forever(DELTA, is_interrupted=True) is None
    assert follower.is_cancelled
    assert follower.fetcher.given_up == 1
    assert not follower.changed.is_set()  # the next change is noticed again


async def test_a_fetch_whose_bytes_are_not_needed_makes_way_for_what_is_here_sooner() -> None:
    """A keyframe of 100 MB at 1 MB/s, of which 1 MB came; a delta of 1 MB leads to the same head."""
    narrow = Link(0.1, MB)
    unneeded = Here(next=DELTA, useless=frozenset({KEYFRAME.key}))
    follower = Follower(LinkOnly(narrow), unneeded)
    follower.fetcher.progress.signed(KEYFRAME.size_bytes, now=0.1)
    follower.clock.advance(1.0)
    assert await follower.fetch_forever(KEYFRAME) is None
    assert follower.fetcher.given_up == 1


@pytest.mark.parametrize(
    ("here", "silent_s"),
    [
        (Here(next=None, useless=frozenset({KEYFRAME.key})), 500.0),
        (Here(next=KEYFRAME, useless=frozenset({KEYFRAME.key})), 500.0),
        (Here(next=DELTA), 500.0),
        (Here(next=replace(DELTA, size_bytes=99 * MB), useless=frozenset({KEYFRAME.key})), 1.0),
    ],
    ids=["nothing instead", "itself", "needed", "no sooner"],
)
async def test_any_other_fetch_goes_on(here: Here, silent_s: float) -> None:
    follower = Follower(LinkOnly(Link(0.1, MB)), here)
    follower.fetcher.progress.signed(KEYFRAME.size_bytes, now=0.1)
    follower.clock.advance(silent_s)
    fetching = asyncio.create_task(follower.fetch_forever(KEYFRAME))
    await until(lambda: follower.looks > 0)
    assert not fetching.done()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert follower.is_cancelled
    assert follower.fetcher.given_up == 0


async def test_after_some_drops_in_a_row_a_fetch_is_finished_until_a_version_was_taken() -> None:
    unneeded = Here(next=DELTA, useless=frozenset({KEYFRAME.key}))
    follower = Follower(LinkOnly(Link(0.1, MB)), unneeded)
    follower.fetcher.progress.signed(KEYFRAME.size_bytes, now=0.1)
    follower.clock.advance(1.0)
    for _ in range(MOST_DROPS):
        assert await follower.fetch_forever(KEYFRAME) is None
    looks = follower.looks
    fetching = asyncio.create_task(follower.fetch_forever(KEYFRAME))
    await until(lambda: follower.looks > looks)
    assert not fetching.done()
    follower.pursuit.took()
    follower.changed.set()
    assert await fetching is None
    assert follower.fetcher.given_up == MOST_DROPS + 1
