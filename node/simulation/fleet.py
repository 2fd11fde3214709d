"""The machines of a simulated run: a learner, hubs that pass on versions, samplers that follow the head.

    learner --artifacts--> coordinator --> relays --> samplers --groups--> relays --> coordinator --> learner

What to fetch, make, keep and lease is decided by the code that decides it in a run. Time and bytes of steps,
groups, artifacts and links are modelled. Left out are faults, evaluations, and fetches given up for others.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from node.coordinator.fleet.heartbeat_pause import drawn_pause_s, pause_s
from node.coordinator.work.decisions import TOO_OLD
from node.limits import LEASES_PER_REQUEST
from node.policy import NO_BASE, Announcement, Artifact, ArtifactKey, PolicyVersion
from node.relay.mirror_state import MirrorState
from node.rollout import LeaseGrant, PromptLease
from node.run import StepRecord
from node.simulation import events, profile
from node.simulation.desk import Desk
from node.simulation.profile import Profile
from node.verdict import GroupVerdict, Verdict
from node.weights.planning import link_time
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, plan_catch_up
from node.weights.planning.pursuit import ROUND_TRIPS, Pursuit
from node.weights.planning.skip_deltas import next_base
from node.weights.store.offers import surplus

ENOUGH: Final = 0.95
"""Share of the samplers that is waited for."""

_KEYFRAMES: Final = 2
"""As hubs retain."""
_PUBLIC_EVERY: Final = 64
_BUSY_PAUSE_S: Final = 1.0


class Hub:
    """The artifacts of the coordinator or a relay, and its link."""

    def __init__(self, link: profile.Link, clock: events.Events) -> None:
        self.up, self.down = events.Link(clock, link.up), events.Link(clock, link.down)
        self.artifacts: tuple[Artifact, ...] = ()
        self.head = PUBLIC_VERSION
        self.tell: list[tuple[float, Callable[[], None]]] = []
        """Who is to hear of the next artifact, and how long that takes."""
        self._clock = clock
        self._paths: dict[tuple[int, int], tuple[Artifact, ...]] = {}
        """As planned: many samplers hold the same."""

    def path(self, held: int, *, artifact_cost_bytes: int = 0) -> tuple[Artifact, ...]:
        """Return the cheapest chain to the head."""
        if (key := (held, artifact_cost_bytes)) not in self._paths:
            path = plan_catch_up(held, self.head, self.artifacts, artifact_cost_bytes=artifact_cost_bytes)
            self._paths[key] = path or ()
        return self._paths[key]

    def put(self, artifact: Artifact) -> None:
        self.artifacts = (*self.artifacts, artifact)
        self.head = max(self.head, artifact.key.version)
        if artifact.key.is_keyframe:
            gone = surplus(self.artifacts, wanted=(self.head,), retained_keyframes=_KEYFRAMES)
            self.artifacts = tuple(one for one in self.artifacts if one.key not in gone)
        self._paths.clear()
        told, self.tell = self.tell, []
        for delay_s, look in told:
            self._clock.after(delay_s, look)


class Relay(Hub):
    """Copies one artifact after the other, as ``MirrorState`` decides."""

    def __init__(self, link: profile.Link, upstream: Hub, clock: events.Events) -> None:
        super().__init__(link, clock)
        self._link, self._upstream = link, upstream
        self._look()

    def _look(self) -> None:
        offered = Announcement(PolicyVersion(self._upstream.head), 1, 0.0, self._upstream.artifacts)
        artifact = MirrorState(upstream=offered, own=self.artifacts).next_artifact()
        if artifact is None:
            self._upstream.tell.append((self._link.round_trip_s / 2, self._look))
            return
        then = partial(self._copied, artifact)
        send = partial(self._upstream.up.send, artifact.size_bytes, then, other_end=self._link.down)
        self._clock.after(ROUND_TRIPS * self._link.round_trip_s, send)

    def _copied(self, artifact: Artifact) -> None:
        self.put(artifact)
        self._look()


class Learner:
    """Takes a step with the oldest groups as soon as it has a batch; publishes while it trains."""

    def __init__(self, fleet: "Fleet") -> None:
        self.version = 0
        self.busy_s = self.upload_s = 0.0
        self.uploaded_bytes = 0
        self.staleness: Counter[tuple[str, int]] = Counter()
        """(kind of the sampler, versions) of each group trained on."""
        self.stale = 0
        self._fleet = fleet
        self._groups: list[tuple[int, str, str]] = []
        """(oldest version, group, kind)."""
        self._is_training = self._is_uploading = False
        self._coded = PUBLIC_VERSION
        """The newest version that was published, or is being."""

    def take_in(self, oldest: int, group_id: str, kind: str) -> None:
        self._groups.append((oldest, group_id, kind))
        self._train()

    def _train(self) -> None:
        run = self._fleet.profile.run
        if self._is_training or len(self._groups) < run.batch_groups:
            return
        self._groups.sort()
        while self._groups and self._groups[0][0] < self.version - run.max_staleness_versions:
            self.stale += 1
            self._fleet.desk.judge(GroupVerdict(self._groups.pop(0)[1], Verdict.STALE))
        if len(self._groups) >= run.batch_groups:
            batch, self._groups = self._groups[: run.batch_groups], self._groups[run.batch_groups :]
            self._is_training = True
            self._fleet.clock.after(self._fleet.profile.learner.step_s, partial(self._stepped, batch))

    def _stepped(self, batch: list[tuple[int, str, str]]) -> None:
        self._is_training = False
        self.busy_s += self._fleet.profile.learner.step_s
        ages = tuple(self.version - oldest for oldest, _, _ in batch)
        self.staleness.update(zip((kind for _, _, kind in batch), ages, strict=True))
        self.version += 1
        self._fleet.made_at_s.append(self._fleet.clock.now)
        self._fleet.desk.step(StepRecord(self.version, tuple(name for _, name, _ in batch), ages))
        self._train()
        self._publish()

    def _publish(self) -> None:
        """Upload the newest version; while there is none newer, what else is worth having."""
        if self._is_uploading or (key := self._next_key()) is None:
            return
        fleet, link = self._fleet, self._fleet.profile.learner_link
        steps = None if key.is_keyframe else key.version - key.base_version
        artifact = Artifact(key, fleet.profile.learner.size_bytes(steps))
        self._coded = key.version
        self._is_uploading = True
        self.uploaded_bytes += artifact.size_bytes
        then = partial(self._uploaded, artifact, fleet.clock.now)
        send = partial(fleet.coordinator.down.send, artifact.size_bytes, then, other_end=link.up)
        fleet.clock.after(fleet.profile.learner.publish_s + link.round_trip_s, send)

    def _next_key(self) -> ArtifactKey | None:
        if self.version > self._coded:
            return ArtifactKey(self.version, self._coded)
        artifacts, version = self._fleet.coordinator.artifacts, self.version
        keyframe = max((a.key.version for a in artifacts if a.key.is_keyframe), default=PUBLIC_VERSION)
        if version - keyframe >= self._fleet.profile.learner.keyframe_every_versions:
            return ArtifactKey(version, NO_BASE)
        lag = version - min(self._fleet.held)
        base = next_base(version, artifacts, longest_lag_versions=lag, public_every_versions=_PUBLIC_EVERY)
        return None if base is None else ArtifactKey(version, base)

    def _uploaded(self, artifact: Artifact, began_s: float) -> None:
        self._is_uploading = False
        self.upload_s += self._fleet.clock.now - began_s
        self._fleet.announce(artifact)
        self._publish()


class Sampler:
    """Follows its hub's head, and keeps its places filled with leases."""

    def __init__(self, name: str, kind: profile.Samplers, hub: Hub, fleet: "Fleet") -> None:
        self.kind = kind
        self._held = PUBLIC_VERSION
        self._name, self._hub, self._fleet, self._clock = name, hub, fleet, fleet.clock
        self._leases: dict[str, None] = {}
        self._running = 0
        self._asks = self._is_too_old = False
        for begin in (self._look, self._ask, self._send_heartbeat):
            fleet.clock.after(fleet.draw.random() * fleet.heartbeat_s, begin)

    def _send_heartbeat(self) -> None:
        for lease_id in self._fleet.desk.renew(self._name, tuple(self._leases)):
            del self._leases[lease_id]
        pause_s = drawn_pause_s(self._fleet.heartbeat_s, self._fleet.draw.random())
        self._clock.after(pause_s, self._send_heartbeat)

    def _look(self) -> None:
        link, pursuit, round_trips = self.kind.link, self._fleet.pursuits[self.kind.name], ROUND_TRIPS
        path = self._hub.path(self._held)
        if not path:
            self._hub.tell.append((link.round_trip_s / 2, self._look))
            return
        if not pursuit.keeps_up(path, behind_versions=self._hub.head - self._held):
            path = self._hub.path(self._held, artifact_cost_bytes=pursuit.link.artifact_cost_bytes)
            round_trips = 1
        took = partial(self._took, path[0].key.version)
        then = partial(self._clock.after, self.kind.apply_s, took)
        send = partial(self._hub.up.send, path[0].size_bytes, then, other_end=link.down)
        self._clock.after(round_trips * link.round_trip_s, send)

    def _took(self, version: int) -> None:
        self._fleet.note_held(self._held, version)
        self._held = version
        self._look()
        self._is_too_old = False
        self._ask()

    def _ask(self) -> None:
        if not self._asks and not self._is_too_old and self._running < self.kind.places:
            self._asks = True
            self._clock.after(self.kind.link.round_trip_s / 2, self._ask_now)

    def _ask_now(self) -> None:
        wanted = min(self.kind.places - self._running, LEASES_PER_REQUEST)
        grant = self._fleet.desk.lease(self._name, wanted, self._held)
        self._clock.after(self.kind.link.round_trip_s / 2, partial(self._granted, grant, wanted))

    def _granted(self, grant: LeaseGrant, wanted: int) -> None:
        for lease in grant.leases:
            self._leases[lease.lease_id] = None
            self._running += 1
            factor = self._fleet.length(lease, self.kind)
            self._clock.after(self.kind.group_s * factor, partial(self._finished, lease, self._held, factor))
        self._asks = False
        if len(grant.leases) == wanted:
            self._ask()
        elif grant.waits_for == TOO_OLD:
            self._is_too_old = True
        elif grant.leases or grant.waits_for == "share":
            self._asks = True
            self._clock.after(grant.retry_after_s, self._ask_now)
        else:
            self._asks = True
            self._fleet.desk.ask_with_room(self._ask_now)

    def _finished(self, lease: PromptLease, oldest: int, factor: float) -> None:
        self._running -= 1
        self._fleet.generated_s += self.kind.group_s * factor
        self._ask()
        if lease.lease_id in self._leases:
            size_bytes = int(self.kind.group_bytes * factor) + 1
            submit = partial(self._submit, lease, size_bytes, oldest, self._held)
            self._fleet.carry_group(self._hub, size_bytes, submit, rate=self.kind.link.up)

    def _submit(self, lease: PromptLease, size_bytes: int, oldest: int, newest: int) -> None:
        fleet = self._fleet
        verdict = fleet.desk.submit(lease, self._name, size_bytes, oldest, newest)
        if verdict is None:
            self._clock.after(_BUSY_PAUSE_S, partial(self._submit, lease, size_bytes, oldest, newest))
            return
        self._leases.pop(lease.lease_id, None)
        if verdict is Verdict.SPOOLED:
            then = partial(fleet.learner.take_in, oldest, lease.lease_id, self.kind.name)
            fleet.coordinator.up.send(size_bytes, then, other_end=fleet.profile.learner_link.down)


class Fleet:
    """One simulated run."""

    def __init__(self, settings: Profile, *, samplers: int, relays: int, seed: int) -> None:
        self.profile = settings
        self.draw = random.Random(seed)
        self.clock = events.Events()
        self.held = Counter({PUBLIC_VERSION: samplers})
        """Samplers by the version they hold."""
        self.generated_s = 0.0
        self.made_at_s = [0.0]
        """When each version was made."""
        self.spread_s: dict[int, float] = {}
        """Version -> seconds from its step until ENOUGH of the samplers held it or a newer one."""
        self._holders: Counter[int] = Counter()
        self._enough = math.ceil(ENOUGH * samplers)
        run = settings.run
        self.heartbeat_s = pause_s(
            interval_s=run.heartbeat_interval_s, peers=samplers, lease_ttl_s=run.lease_ttl_s
        )
        self.pursuits = {
            kind.name: Pursuit(link_time.Link(kind.link.round_trip_s, kind.link.down))
            for kind in settings.samplers
        }
        self.desk = Desk(settings, self.clock, samplers=samplers)
        self.coordinator = Hub(settings.coordinator_link, self.clock)
        self.relays = [Relay(settings.relay_link, self.coordinator, self.clock) for _ in range(relays)]
        self.learner = Learner(self)
        hubs: Sequence[Hub] = self.relays or (self.coordinator,)
        self.samplers = [
            Sampler(f"{kind.name}-{number}", kind, hubs[number % len(hubs)], self)
            for number, kind in enumerate(_kinds(settings.samplers, samplers))
        ]

    def run(self) -> None:
        self.clock.run(self.profile.seconds)
        self.desk.note_waiting()
        for hub in (self.coordinator, *self.relays):
            hub.up.settle()
            hub.down.settle()

    def length(self, lease: PromptLease, kind: profile.Samplers) -> float:
        """Return how much longer than the mean a group is."""
        is_long = random.Random(lease.prompt_index).random() < self.profile.prompts.long_share
        factor = self.draw.lognormvariate(-(kind.spread**2) / 2, kind.spread)
        return factor * (self.profile.prompts.long_factor if is_long else 1.0)

    def carry_group(self, hub: Hub, size_bytes: int, then: Callable[[], None], *, rate: float) -> None:
        """Carry a group to the coordinator, over the sampler's relay if it has one."""
        if hub is not self.coordinator:
            hub.up.carried_bytes += size_bytes
            up = self.profile.relay_link.up
            then = partial(self.coordinator.down.send, size_bytes, then, other_end=up)
        hub.down.send(size_bytes, then, other_end=rate)

    def announce(self, artifact: Artifact) -> None:
        """Put what the learner uploaded on offer."""
        version = artifact.key.version
        announced = Announcement(PolicyVersion(version), 1, self.made_at_s[version], ())
        for pursuit in self.pursuits.values():
            pursuit.announced(announced)
        self.coordinator.put(artifact)

    def note_held(self, before: int, version: int) -> None:
        """Note that a sampler holds a newer version."""
        self.held[version] += 1
        self.held[before] -= 1
        if not self.held[before]:
            del self.held[before]
        for newer in range(before + 1, version + 1):
            self._holders[newer] += 1
            if self._holders[newer] == self._enough:
                self.spread_s[newer] = self.clock.now - self.made_at_s[newer]


def _kinds(kinds: tuple[profile.Samplers, ...], samplers: int) -> list[profile.Samplers]:
    """Return the kind of each sampler, evenly mixed: next is the kind that is furthest below its part."""
    whole, found, counts = sum(kind.part for kind in kinds), [], Counter[str]()
    for number in range(1, samplers + 1):
        found.append(max(kinds, key=lambda one: number * one.part / whole - counts[one.name]))
        counts[found[-1].name] += 1
    return found
