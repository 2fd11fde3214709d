"""Decides whose announcements count, and whose turn it is to be read from; pure.

    in use       planned with what it announces; the next range is read from the source with the fewest lanes,
                 so that one that delivers faster has its turn more often
    set aside    after a fault, for a term that doubles with each in a row; asked only if no other is left
    last resort  counts only after the others have been behind it for PATIENCE_S
    bucket       a hub's, where it has one: read instead of the hub, unless it is set aside

Nothing a source announces is signed. It is compared with every signed manifest seen: a source that
announced another root or another size lied. What it sends is verified frame by frame elsewhere, so the
worst a source can do is to cost time.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from node.values.limits import ARTIFACTS_PER_ANNOUNCEMENT
from node.values.policy import NO_BASE, Announcement, Artifact, ArtifactKey
from node.weights.format.manifest import Manifest
from node.weights.planning.cheapest_chain import newest_reachable, plan_fresh

PATIENCE_S: Final = 10.0
"""How long the others may be behind before the last resort is asked: longer than a relay takes to reconnect,
so that its restart does not send a hundred samplers to one uplink."""


def bucket_of(hub: str) -> str:
    """Return the name of a hub's bucket."""
    return f"bucket of {hub}"


class Fault(enum.StrEnum):
    """Faults of a source. A closed set: also a label."""

    LOST = "lost"
    """It did not answer, or stopped in mid-stream."""
    REFUSED = "refused"
    """It will not serve this peer: revoked, expired, of another run. Its word is no worse for that."""
    DAMAGED = "damaged"
    """A whole frame from it has another digest than signed."""
    SLOW = "slow"
    """A range took it several times as long as a range is to take."""
    LIED = "lied"
    """Its announcement or its data contradicts a signed manifest, or the protocol."""


_FIRST_TERM_S: Final = {
    Fault.LOST: 1.0,
    Fault.SLOW: 1.0,
    Fault.REFUSED: 5.0,
    Fault.DAMAGED: 30.0,
    Fault.LIED: 60.0,
}
_LONGEST_TERM_S: Final = {
    Fault.LOST: 30.0,
    Fault.SLOW: 30.0,
    Fault.REFUSED: 60.0,
    Fault.DAMAGED: 3600.0,
    Fault.LIED: 3600.0,
}


@dataclass(slots=True)
class _Standing:
    announcement: Announcement | None = None
    reach: int = NO_BASE
    """Newest version that can be reached by what it announces."""
    lanes: int = 0
    faults: int = 0
    """In a row."""
    is_doubted: bool = False
    """It sent or announced something wrong: its announcements are ignored."""
    back_at_s: float = 0.0
    lacking: set[ArtifactKey] = field(default_factory=set)
    """Artifacts it turned out not to have since its last announcement."""

    def offers(self, announcement: Announcement | None) -> None:
        self.announcement = announcement
        newest = None if announcement is None else newest_reachable(announcement.artifacts)
        self.reach = NO_BASE if newest is None else newest


class SourceTurns:
    """State of every source. Times are seconds on any monotonic clock."""

    def __init__(self, names: Sequence[str], *, last_resort: str | None = None) -> None:
        """Begin with nothing known. ``names``, at least one, are first asked in this order."""
        self._standing = {name: _Standing() for name in names}
        self._last_resort = last_resort
        if last_resort is not None:
            self._standing[last_resort] = _Standing()
        self._buckets: dict[str, str] = {}
        """Hub -> its bucket, which has a standing of its own."""
        self._behind_since_s: float | None = None
        self._sizes: dict[ArtifactKey, int] = {}
        self._roots: dict[int, bytes] = {}

    def heard(self, name: str, announcement: Announcement) -> bool:
        """Record what a source announces; return False if it contradicts a signed manifest."""
        is_consistent = self._is_consistent(announcement)
        self._standing[name].lacking.clear()
        self._standing[name].offers(announcement if is_consistent else None)
        if announcement.in_bucket or name in self._buckets:
            bucket = self._standing.setdefault(self._buckets.setdefault(name, bucket_of(name)), _Standing())
            there = set(announcement.in_bucket) if is_consistent else set()
            artifacts = tuple(artifact for artifact in announcement.artifacts if artifact.key in there)
            bucket.offers(replace(announcement, artifacts=artifacts))
        return is_consistent

    def lost(self, name: str) -> None:
        """Record that a source is no longer heard: what it announced may be gone, except from its bucket."""
        self._standing[name].offers(None)

    def lacks(self, name: str, key: ArtifactKey) -> None:
        """Record that a source does not have an artifact, whatever it announced last."""
        standing = self._standing[name]
        standing.lacking.add(key)
        if standing.announcement is not None:
            left = tuple(a for a in standing.announcement.artifacts if a.key != key)
            standing.offers(replace(standing.announcement, artifacts=left))

    def signed(self, manifest: Manifest) -> tuple[str, ...]:
        """Record a verified manifest; return the sources that announced something else, and forget that."""
        self._sizes[manifest.key] = manifest.size_bytes
        self._roots[manifest.version] = manifest.root
        while len(self._sizes) > ARTIFACTS_PER_ANNOUNCEMENT:
            oldest = min(self._sizes)
            del self._sizes[oldest]
            self._roots.pop(oldest.version, None)
        liars = tuple(
            name
            for name, standing in self._standing.items()
            if standing.announcement is not None and not self._is_consistent(standing.announcement)
        )
        for name in liars:
            self._standing[name].offers(None)
        return liars

    def delivered(self, name: str) -> None:
        """Record that a lane received bytes, verified or not; the source is no longer set aside."""
        standing = self._standing[name]
        if not standing.is_doubted:
            standing.faults, standing.back_at_s = 0, 0.0

    def fault(self, name: str, fault: Fault, *, now: float) -> None:
        standing = self._standing[name]
        term_s = min(_FIRST_TERM_S[fault] * 2**standing.faults, _LONGEST_TERM_S[fault])
        standing.faults = min(standing.faults + 1, 16)
        standing.is_doubted |= fault in (Fault.DAMAGED, Fault.LIED)
        standing.back_at_s = max(standing.back_at_s, now + term_s)

    def announcement(self, now: float) -> Announcement | None:
        """Return what the sources that count announce, merged; None: nothing."""
        said = [self._standing[name].announcement for name in self._names(now)]
        return merged([announcement for announcement in said if announcement is not None])

    def candidates(self, key: ArtifactKey, *, now: float) -> tuple[str, ...]:
        """Return whom to ask for an artifact: those not set aside, else everyone who might have it."""
        names = [name for name in self._names(now) if key not in self._standing[name].lacking]
        knowing = [name for name in names if _has(self._standing[name].announcement, key)] or names
        return tuple(filter(lambda name: self.is_standing(name, now=now), knowing)) or tuple(knowing)

    def readable(self, key: ArtifactKey, *, now: float) -> tuple[str, ...]:
        """Return whom to read an artifact's frames from: ``candidates``, buckets instead of their hubs."""
        return tuple(self._payloads_of(hub, key, now) for hub in self.candidates(key, now=now))

    def has_bucket(self, hub: str, *, now: float) -> bool:
        """Return whether a hub's payloads are rather read from its bucket."""
        bucket = self._buckets.get(hub)
        if bucket is None or not self.is_standing(bucket, now=now):
            return False
        announcement = self._standing[bucket].announcement
        return announcement is not None and bool(announcement.artifacts)

    def standing(self, *, now: float) -> tuple[str, ...]:
        """Return the sources that count and are not set aside, or all that count; announcing ones if any."""
        names = self._names(now)
        standing = tuple(name for name in names if self.is_standing(name, now=now)) or names
        return tuple(name for name in standing if self._standing[name].announcement is not None) or standing

    def is_standing(self, name: str, *, now: float) -> bool:
        return now >= self._standing[name].back_at_s

    def next_of(self, names: Sequence[str]) -> str:
        """Return whose turn it is: the first of the sources that the fewest lanes read from."""
        return min(names, key=lambda name: self._standing[name].lanes)

    def take_lane(self, name: str) -> None:
        self._standing[name].lanes += 1

    def leave_lane(self, name: str) -> None:
        self._standing[name].lanes -= 1

    def _payloads_of(self, hub: str, key: ArtifactKey, now: float) -> str:
        bucket = self._buckets.get(hub)
        if bucket is None or not self.is_standing(bucket, now=now):
            return hub
        return bucket if _has(self._standing[bucket].announcement, key) else hub

    def _names(self, now: float) -> tuple[str, ...]:
        """Return the hubs that count now: not the last resort while the others keep up with it."""
        self._forgive(now)
        other = {self._last_resort, *self._buckets.values()}
        first = tuple(name for name in self._standing if name not in other)
        trusted = tuple(name for name in first if not self._standing[name].is_doubted)
        if self._last_resort is None:
            return trusted or first
        reach = max((self._standing[name].reach for name in trusted), default=NO_BASE)
        if reach >= self._standing[self._last_resort].reach:
            self._behind_since_s = None
            return trusted or first
        if self._behind_since_s is None:
            self._behind_since_s = now
        if now - self._behind_since_s < PATIENCE_S:
            return trusted or first
        return (*trusted, self._last_resort)

    def _is_consistent(self, announcement: Announcement) -> bool:
        """Return whether an announcement agrees with every signed manifest seen."""
        head = announcement.head
        if head.root and self._roots.get(head.number, head.root) != head.root:
            return False
        return all(
            self._sizes.get(artifact.key, artifact.size_bytes) == artifact.size_bytes
            for artifact in announcement.artifacts
        )

    def _forgive(self, now: float) -> None:
        for standing in self._standing.values():
            if standing.is_doubted and now >= standing.back_at_s:
                standing.is_doubted = False


def merged(announcements: Iterable[Announcement]) -> Announcement | None:
    """Return everything that can be had from some source, and the newest head that can be reached.

    If two sources announce different sizes for an artifact, the smaller counts: it is then fetched, and
    its signed manifest shows who lied.
    """
    heads = sorted(announcements, key=lambda announcement: announcement.head.number, reverse=True)
    if not heads:
        return None
    sizes: dict[ArtifactKey, int] = {}
    for artifact in (artifact for announcement in heads for artifact in announcement.artifacts):
        sizes[artifact.key] = min(artifact.size_bytes, sizes.get(artifact.key, artifact.size_bytes))
    artifacts = tuple(Artifact(key, sizes[key]) for key in sorted(sizes))
    reachable = (each for each in heads if plan_fresh(each.head.number, artifacts) is not None)
    newest = next(reachable, heads[0])
    return Announcement(newest.head, newest.learner_epoch, newest.published_at_s, artifacts)


def _has(announcement: Announcement | None, key: ArtifactKey) -> bool:
    return announcement is not None and any(artifact.key == key for artifact in announcement.artifacts)
