"""Whatever link, pace and keyframes: what is held follows the head, and every fetch that is not cut ends."""

import math
import random
from dataclasses import dataclass, field

import pytest

from node.values.policy import Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.planning.cheapest_chain import plan_catch_up
from node.weights.planning.link_time import FAR_S, Link
from node.weights.store.offers import surplus

MB = 1_000_000
LOOK_AGAIN_S = 0.25


def test_a_longer_round_trip_is_believed_at_once_and_a_shorter_one_slowly() -> None:
    link = Link().answered(1.0).answered(5.0)
    assert link.round_trip_s == 5.0
    assert link.answered(1.0).round_trip_s == 4.5


def test_round_trips_are_bytes_on_a_far_link_and_nothing_on_a_near_one() -> None:
    assert Link().artifact_cost_bytes == 0
    assert Link(0.99 * FAR_S, 4 * MB).artifact_cost_bytes == 0
    assert Link(FAR_S, 4 * MB).artifact_cost_bytes == FAR_S * 4 * MB
    assert Link(2.0).artifact_cost_bytes == 1 << 40  # of unknown rate: only round trips count


def test_a_rate_is_measured_on_bytes_enough_and_time_enough_and_follows_by_halves() -> None:
    for size_bytes, took_s in ((1_000, 5.0), (10 * MB, 0.001)):
        assert Link(2.0).carried(size_bytes, took_s=took_s) == Link(2.0)
    assert Link(2.0).carried(10 * MB, took_s=5.0).artifact_cost_bytes == 4 * MB
    least = Link().carried(256 << 10, took_s=0.02)
    assert least.bytes_per_s == (256 << 10) / 0.02
    assert Link(0.0, 4 * MB).carried(10 * MB, took_s=5.0).bytes_per_s == 3 * MB


@dataclass
class World:
    """A learner that publishes, the hub's store, and a link: a fake of everything around the decisions."""

    random: random.Random
    round_trip_s: float
    bytes_per_s: float
    version_s: float
    keyframe_every: int
    delta_bytes: int
    keyframe_bytes: int
    jitter: float
    cut_every_s: float
    said: dict[int, Announcement] = field(default_factory=dict)
    """Announcements by their head."""

    def head(self, now: float) -> int:
        return int(now / self.version_s)

    def announcement(self, now: float) -> Announcement | None:
        head = self.head(now)
        if not head:
            return None
        if head not in self.said:
            self.said = {head: self._announcement(head)} | dict(list(self.said.items())[:64])
        return self.said[head]

    def _announcement(self, head: int) -> Announcement:
        every = self.keyframe_every
        oldest = max(0, (head // every - 2) * every)
        deltas = [Artifact(ArtifactKey(n, n - 1), self.delta_bytes) for n in range(max(1, oldest), head + 1)]
        keyframes = [
            Artifact(ArtifactKey(n), self.keyframe_bytes) for n in range(max(every, oldest), head + 1, every)
        ]
        public = head // 16 * 16
        if public:
            deltas.append(Artifact(ArtifactKey(public, 0), self.keyframe_bytes // 2))
        made = [*deltas, *keyframes]
        gone = surplus(made, wanted=(head,), retained_keyframes=2)
        kept = tuple(artifact for artifact in made if artifact.key not in gone)
        return Announcement(PolicyVersion(head, b"r"), 1, 1.0 + head * self.version_s, kept)

    def trip_s(self) -> float:
        """Return the time of one way."""
        return self.round_trip_s / 2 * (1 + self.jitter * self.random.random())

    @property
    def fetch_s(self) -> float:
        """How long the largest fetch takes at its slowest."""
        return 2 * self.round_trip_s * (1 + self.jitter) + self.keyframe_bytes / self.bytes_per_s

    @property
    def bound_versions(self) -> float:
        """How far a version may be behind the head when it is taken."""
        delta_s = self.round_trip_s + self.delta_bytes / self.bytes_per_s
        in_steps = self.fetch_s / delta_s if delta_s else 0
        lost_s = 2 * self.fetch_s + 4 if math.isfinite(self.cut_every_s) else 0.0
        return self.keyframe_every + in_steps + (1.5 * self.fetch_s + lost_s + 1.0) / self.version_s


class Sampler:
    """``PolicySync`` in a world without bytes: it asks what comes next, and finishes what it fetches."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = 0.0
        self.held = 0
        self.link = Link()
        self.taken: list[tuple[float, int]] = []

    def run(self, until_s: float) -> None:
        while self.now < until_s:
            self.ask()

    def ask(self) -> None:
        world, cost = self.world, self.link.artifact_cost_bytes
        there_s = self.now + world.trip_s()
        said = world.announcement(there_s)
        path = said and plan_catch_up(self.held, said.head.number, said.artifacts, artifact_cost_bytes=cost)
        if not path:
            self.now += LOOK_AGAIN_S
            return
        back_s = there_s + world.trip_s()
        self.link = self.link.answered(back_s - self.now)
        self.now = back_s
        is_pushed = not path[0].key.is_keyframe or path[0].size_bytes <= cost
        self.fetch(path[0], is_pushed=is_pushed)

    def fetch(self, artifact: Artifact, *, is_pushed: bool) -> None:
        """Fetch, after another round trip unless it is sent already, until it is whole or cut."""
        world = self.world
        first_s = self.now + (0.0 if is_pushed else 2 * world.trip_s())
        whole_s = first_s + artifact.size_bytes / world.bytes_per_s
        cut_s = self.now + world.random.expovariate(1.0) * world.cut_every_s
        if cut_s < whole_s:
            self.now = cut_s + 1.0
            return
        self.now = whole_s
        self.link = self.link.carried(artifact.size_bytes, took_s=whole_s - first_s)
        self.held = artifact.key.version
        self.taken.append((self.now, artifact.key.version))


def world(seed: int) -> World:
    draw = random.Random(seed)
    keyframe_bytes = int(10 ** draw.uniform(5, 9))
    return World(
        draw,
        round_trip_s=10 ** draw.uniform(-2.3, 1.3),
        bytes_per_s=10 ** draw.uniform(5.5, 8.5),
        version_s=10 ** draw.uniform(-1, 1.5),
        keyframe_every=draw.choice([5, 10, 64]),
        delta_bytes=max(100, int(keyframe_bytes * 10 ** draw.uniform(-2.7, -1))),
        keyframe_bytes=keyframe_bytes,
        jitter=draw.choice([0.0, 0.5, 2.0]),
        cut_every_s=math.inf,
    )


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 7, 11])
def test_what_is_held_follows_the_head_over_any_line(seed: int) -> None:
    around = world(seed)
    warm_s = 4 * around.fetch_s + 4 * around.keyframe_every * around.version_s
    sampler = Sampler(around)
    sampler.run(warm_s + 12 * around.fetch_s + 40 * around.version_s)
    late = [(at_s, number) for at_s, number in sampler.taken if at_s > warm_s]
    assert late, f"{around}: nothing was taken"
    behind = max(around.head(at_s) - number for at_s, number in late)
    assert behind <= around.bound_versions, f"{around}: {behind} versions behind"
    numbers = [number for _, number in sampler.taken]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("seed", range(3))
def test_it_goes_on_where_the_line_is_cut_and_jumps(seed: int) -> None:
    around = world(1000 + seed)
    around.cut_every_s = 5 * around.fetch_s
    sampler = Sampler(around)
    sampler.run(20 * around.fetch_s)
    around.round_trip_s *= 10  # another provider: nothing that was measured holds
    sampler.taken.clear()
    sampler.run(sampler.now + 60 * around.fetch_s + 60 * around.version_s)
    assert len(sampler.taken) >= 3, f"{around}: {sampler.taken}"
    behind = min(around.head(at_s) - number for at_s, number in sampler.taken[-5:])
    assert behind <= around.bound_versions
