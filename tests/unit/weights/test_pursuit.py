"""Whatever link, pace and keyframes: what is held follows the head, and fetches end."""

import math
import random
from dataclasses import dataclass, field, replace

import pytest

from node.errors import RefusedError
from node.policy import Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.planning.cheapest_chain import plan_catch_up
from node.weights.planning.link_time import FetchProgress, Link
from node.weights.planning.pursuit import MOST_DROPS, ROUND_TRIPS, Pursuit
from node.weights.store.offers import surplus
from node.weights.transfer.head_pursuit import LOOK_AGAIN_S
from sampler.versions.fetch_plan import FetchPlan

MB = 1_000_000
KEYFRAME, DELTA = Artifact(ArtifactKey(20), 100 * MB), Artifact(ArtifactKey(21, 20), MB)


def measured(
    round_trip_s: float, mbytes_per_s: float = math.inf, *, version_s: float | None = None
) -> Pursuit:
    return Pursuit(Link(round_trip_s, mbytes_per_s * MB), version_s)


def test_the_pace_is_taken_from_what_is_announced_by_the_learners_clock() -> None:
    pursuit = Pursuit()
    paces = []
    for number, at_s in ((4, 100.0), (4, 101.0), (3, 102.0), (5, 100.0), (8, 108.0), (9, 114.0)):
        pursuit.announced(Announcement(PolicyVersion(number), 1, at_s, ()))
        paces.append(pursuit.version_s)
    assert paces == [None, None, None, None, 2.0, 3.0]  # at last a quarter of the way from 2 to 6


def test_the_cheapest_way_in_bytes_is_taken_while_it_halves_the_distance() -> None:
    path = [DELTA] * 4
    assert measured(9.0).keeps_up(path, behind_versions=4)  # nothing is known of the pace
    assert measured(0.1, 10, version_s=1.0).keeps_up(path, behind_versions=4)  # 4 x 0.3 s of 4 s
    assert not measured(0.1, 10, version_s=0.5).keeps_up(path, behind_versions=4)  # 1.2 s of 2 s


def test_a_fetch_under_way_is_finished_where_something_else_would_not_be_here_much_sooner() -> None:
    far = measured(5.0)
    begun = FetchProgress(began_at_s=0.0)
    assert far.is_worth_finishing(begun, KEYFRAME, instead=DELTA, now=1.0)  # 9 s instead of 10
    begun.signed(KEYFRAME.size_bytes, now=5.0)
    assert far.is_worth_finishing(begun, KEYFRAME, instead=DELTA, now=9.0)


def test_a_fetch_is_due_by_the_round_trips_and_bytes_it_still_needs() -> None:
    link = Link(2.0, 4 * MB)
    begun = FetchProgress(began_at_s=10.0)
    assert (
        begun.remaining_s(link, size_bytes=8 * MB, now=11.0) == 5.0
    )  # two round trips, 2 s of bytes, 1 s ago
    begun.signed(12 * MB, now=13.0)
    assert (
        begun.remaining_s(link, size_bytes=8 * MB, now=13.5) == 4.5
    )  # one, and 3 s: the manifest knows better
    begun.arrived(2 * MB, now=15.0)
    begun.arrived(2 * MB, now=17.0)
    assert begun.remaining_s(link, size_bytes=8 * MB, now=17.0) == 4.0  # 8 MB at the 2 MB/s that it has seen
    assert (
        begun.remaining_s(Link(2.0, MB), size_bytes=8 * MB, now=17.0) == 8.0
    )  # the link has got slower since
    assert begun.silence_s(30.0) == 13.0
    assert begun.remaining_s(link, size_bytes=8 * MB, now=30.0) == 13.0  # overdue


def test_a_keyframe_of_minutes_is_left_for_a_delta_of_a_second() -> None:
    begun = FetchProgress(began_at_s=0.0, size_bytes=KEYFRAME.size_bytes, signed_at_s=0.1)
    narrow = measured(0.1, 1)
    assert not narrow.is_worth_finishing(begun, KEYFRAME, instead=DELTA, now=1.0)
    begun.arrived(KEYFRAME.size_bytes - MB // 2, now=99.0)
    assert narrow.is_worth_finishing(begun, KEYFRAME, instead=DELTA, now=99.0)


def test_a_line_that_fell_silent_is_left_and_a_line_never_measured_is_not() -> None:
    begun = FetchProgress(began_at_s=0.0)
    begun.signed(MB, now=0.01)
    assert not measured(0.01).is_worth_finishing(begun, KEYFRAME, instead=DELTA, now=1.0)
    assert Pursuit().is_worth_finishing(begun, KEYFRAME, instead=DELTA, now=1.0)


def test_after_some_drops_in_a_row_everything_is_finished() -> None:
    begun = FetchProgress(began_at_s=0.0)
    pursuit = measured(0.01)
    for _ in range(MOST_DROPS):
        assert not pursuit.is_worth_finishing(begun, KEYFRAME, instead=DELTA, now=60.0)
        pursuit.drops_in_a_row += 1
    assert pursuit.is_worth_finishing(begun, KEYFRAME, instead=DELTA, now=60.0)


def test_a_longer_round_trip_is_believed_at_once_and_a_shorter_one_slowly() -> None:
    link = Link().answered(1.0).answered(5.0)
    assert link.round_trip_s == 5.0
    assert link.answered(1.0).round_trip_s == 4.5
    assert link.silent(20.0).round_trip_s == 20.0
    assert measured(4.0).patience_s == 9.0  # a second, and two round trips
    assert Link().artifact_cost_bytes == 0
    for size_bytes, took_s in ((1_000, 5.0), (10 * MB, 0.001)):  # too little, or too soon, to measure
        assert Link(2.0).carried(size_bytes, took_s=took_s) == Link(2.0)
    assert Link(2.0).carried(10 * MB, took_s=5.0).artifact_cost_bytes == 4 * MB


def test_a_rate_is_measured_on_bytes_enough_and_time_enough_and_follows_by_halves() -> None:
    least = Link().carried(256 << 10, took_s=0.02)
    assert least.bytes_per_s == (256 << 10) / 0.02
    assert Link(0.0, 4 * MB).carried(10 * MB, took_s=5.0).bytes_per_s == 3 * MB


def test_a_fetch_is_silent_since_the_last_it_heard() -> None:
    begun = FetchProgress(began_at_s=0.0)
    assert begun.silence_s(0.5) == 0.5
    begun.signed(8 * MB, now=0.5)
    assert begun.silence_s(0.75) == 0.25
    begun.arrived(2 * MB, now=1.0)
    begun.arrived(2 * MB, now=1.5)
    assert begun.silence_s(1.75) == 0.25
    # 4 MB at the 8 MB/s that it has seen.
    assert begun.remaining_s(Link(2.0), size_bytes=0, now=1.5) == 0.5
    begun.arrived(6 * MB, now=2.0)  # more than was signed
    assert begun.remaining_s(Link(2.0), size_bytes=0, now=2.0) == 0.0


def test_half_is_enough_to_keep_up_and_not_enough_to_drop_a_fetch() -> None:
    assert measured(0.5, version_s=2.0).keeps_up([DELTA], behind_versions=1)
    begun, near = FetchProgress(began_at_s=0.0), measured(1.0)
    assert near.is_worth_finishing(begun, KEYFRAME, instead=DELTA, now=3.9)
    assert not near.is_worth_finishing(begun, KEYFRAME, instead=DELTA, now=4.0)
    assert near.is_worth_finishing(begun, KEYFRAME, instead=None, now=4.0)


def test_people_are_told_what_keeps_a_far_sampler_from_the_bound() -> None:
    said = measured(5.0, version_s=0.2).distance(44, bound_versions=32)
    assert said == "44 behind, 25 more in a round trip of 5 s, bound 32"
    said = measured(5.0).distance(1, bound_versions=32)
    assert said == "1 behind, 0 more in a round trip of 5 s, bound 32"


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

    def has(self, key: ArtifactKey, now: float) -> bool:
        said = self.announcement(now)
        return said is not None and any(artifact.key == key for artifact in said.artifacts)

    def trip_s(self) -> float:
        """Return the time of one way."""
        return self.round_trip_s / 2 * (1 + self.jitter * self.random.random())

    @property
    def fetch_s(self) -> float:
        """How long the largest fetch takes at its slowest."""
        return 2 * self.round_trip_s * (1 + self.jitter) + self.keyframe_bytes / self.bytes_per_s

    @property
    def look_again_s(self) -> float:
        """As in ``PolicySync``, but no more than about 100 looks at one fetch."""
        return max(LOOK_AGAIN_S, self.fetch_s / 100)

    @property
    def bound_versions(self) -> float:
        """How far a version may be behind the head: see ``node.weights.planning.pursuit``."""
        delta_s = self.round_trip_s + self.delta_bytes / self.bytes_per_s
        in_steps = self.fetch_s / delta_s if delta_s else 0
        lost_s = 2 * self.fetch_s + 4 if math.isfinite(self.cut_every_s) else 0.0
        return self.keyframe_every + in_steps + (1.5 * self.fetch_s + lost_s + 1.0) / self.version_s


class Sampler:
    """``PolicySync`` in a world without bytes: the same decisions, in the same order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = 0.0
        self.state = FetchPlan(PolicyVersion(0))
        self.pursuit = Pursuit()
        self.taken: list[tuple[float, int]] = []
        self.begun = self.longest_in_vain = self.in_vain = 0

    def hear(self, now: float) -> None:
        said = self.world.announcement(now - self.world.round_trip_s / 2)
        if said is not None and said is not self.state.announcement:
            try:
                self.state = replace(self.state, announcement=said, unusable=frozenset())
            except RefusedError:
                raise AssertionError("an honest hub is never refused") from None
            self.pursuit.announced(said)

    def answered(self, took_s: float) -> None:
        self.pursuit.link = self.pursuit.link.answered(took_s)

    def run(self, until_s: float) -> None:
        while self.now < until_s:
            self.hear(self.now)
            path = self.state.path()
            if not path:
                self.now += self.world.look_again_s
            elif self.pursuit.keeps_up(path, behind_versions=self.state.behind_versions):
                self.fetch(path[0], first=ROUND_TRIPS)
            else:
                self.fetch_what_comes()

    def fetch_what_comes(self) -> None:
        world, cost = self.world, self.pursuit.link.artifact_cost_bytes
        there_s = self.now + world.trip_s()
        said = world.announcement(there_s)
        assert said is not None
        held = self.state.held.number
        path = plan_catch_up(held, said.head.number, said.artifacts, artifact_cost_bytes=cost)
        if not path:
            self.now += self.world.look_again_s
            return
        back_s = there_s + world.trip_s()
        self.answered(back_s - self.now)
        is_pushed = not path[0].key.is_keyframe or path[0].size_bytes <= cost
        began_s, self.now = self.now, back_s
        self.fetch(path[0], first=0 if is_pushed else 1, began_s=began_s)

    def fetch(self, artifact: Artifact, *, first: int, began_s: float | None = None) -> None:
        """Fetch, after so many round trips, until it is whole, refused, cut or dropped."""
        world, started_s = self.world, self.now
        self.begun += 1
        progress = FetchProgress(self.now if began_s is None else began_s)
        if first == ROUND_TRIPS:
            there_s = self.now + world.trip_s()
            back_s = there_s + world.trip_s()
            if not world.has(artifact.key, there_s):
                self.now = back_s
                self.answered(back_s - started_s)
                self.state = replace(self.state, unusable=self.state.unusable | {artifact.key})
                self.missed()
                return
            signed_s = back_s
        else:
            signed_s = self.now
        first_s = signed_s + (2 * world.trip_s() if first else 0.0)
        whole_s = first_s + artifact.size_bytes / world.bytes_per_s
        cut_s = self.now + world.random.expovariate(1.0) * world.cut_every_s
        while self.now < whole_s:
            if self.now >= cut_s:
                self.now += 1.0
                self.missed()
                return
            self.now = min(self.now + world.look_again_s, whole_s)
            self.hear(self.now)
            if self.now >= signed_s and progress.signed_at_s is None:
                progress.signed(artifact.size_bytes, now=signed_s)
                if first == ROUND_TRIPS:
                    self.answered(signed_s - started_s)
            if self.now > first_s:
                came = int(min((self.now - first_s) * world.bytes_per_s, artifact.size_bytes))
                progress.arrived(came - progress.arrived_bytes, now=self.now)
            instead = self.state.next_artifact()
            if self.state.is_useless(artifact.key) and not self.pursuit.is_worth_finishing(
                progress, artifact, instead=instead, now=self.now
            ):
                self.pursuit.link = self.pursuit.link.silent(progress.silence_s(self.now))
                self.pursuit.drops_in_a_row += 1
                self.missed()
                return
        self.pursuit.link = self.pursuit.link.carried(artifact.size_bytes, took_s=whole_s - first_s)
        self.pursuit.drops_in_a_row = 0
        self.state = replace(self.state, held=PolicyVersion(artifact.key.version, b"r"))
        self.taken.append((self.now, artifact.key.version))
        self.in_vain = 0

    def missed(self) -> None:
        self.in_vain += 1
        self.longest_in_vain = max(self.longest_in_vain, self.in_vain)


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


@pytest.mark.parametrize("seed", range(12))
def test_what_is_held_follows_the_head_over_any_line(seed: int) -> None:
    around = world(seed)
    warm_s = 4 * around.fetch_s + 4 * around.keyframe_every * around.version_s
    sampler = Sampler(around)
    sampler.run(warm_s + 12 * around.fetch_s + 40 * around.version_s)
    late = [(at_s, number) for at_s, number in sampler.taken if at_s > warm_s]
    assert late, f"{around}: nothing was taken, {sampler.begun} fetches were begun"
    behind = max(around.head(at_s) - number for at_s, number in late)
    assert behind <= around.bound_versions, f"{around}: {behind} versions behind"
    numbers = [number for _, number in sampler.taken]
    assert numbers == sorted(set(numbers))
    assert sampler.longest_in_vain <= 2 * MOST_DROPS


@pytest.mark.parametrize("seed", range(5))
def test_it_goes_on_where_the_line_is_cut_and_jumps(seed: int) -> None:
    around = world(1000 + seed)
    around.cut_every_s = 5 * around.fetch_s
    sampler = Sampler(around)
    sampler.run(20 * around.fetch_s)
    around.round_trip_s *= 10  # another provider: nothing that was measured holds
    sampler.taken.clear()
    sampler.run(sampler.now + 60 * around.fetch_s + 60 * around.version_s)
    assert len(sampler.taken) >= 3, f"{around}: {sampler.taken} of {sampler.begun} begun"
    behind = min(around.head(at_s) - number for at_s, number in sampler.taken[-5:])
    assert behind <= around.bound_versions
