"""Plans the way from the held version to the head, or to a stop on the way; pure.

What to fetch next is the first artifact of the cheapest path, or what a source chooses to send. An artifact
that cannot be used is planned around until it is announced again.
"""

from dataclasses import dataclass

from node.values.policy import NO_BASE, Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, plan_catch_up, plan_fresh


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The version held and what is announced: a ``Position`` of ``fetcher``."""

    held: PolicyVersion
    """The version in memory, verified or the base model; the next delta starts from it."""
    announcement: Announcement | None = None
    unusable: frozenset[ArtifactKey] = frozenset()
    stop_from: int | None = None
    """The first version from here on comes before any newer one; None: straight to the head."""

    def next_artifact(self) -> Artifact | None:
        return next(iter(self.path()), None)

    def path(self) -> tuple[Artifact, ...]:
        """Return the cheapest path in bytes to the next stop; empty at the head or where there is none."""
        stop = self._stop
        to_stop = None if stop is None else plan_catch_up(self.held.number, stop, self._usable)
        return to_stop or self._path_from(self.held) or ()

    @property
    def behind_versions(self) -> int:
        head = self.held.number if self.announcement is None else self.announcement.head.number
        return max(0, head - self.held.number)

    @property
    def held_version(self) -> int:
        return self.held.number

    @property
    def lets_choose(self) -> bool:
        """Whether a source may choose the way: not to a stop, nor around what cannot be used."""
        return self._stop is None and not self.unusable

    def can_start(self, key: ArtifactKey) -> bool:
        is_here = key.base_version in (self.held.number, PUBLIC_VERSION, NO_BASE)
        if (stop := self._stop) is not None and key.version > stop:
            return False
        return is_here and key.version > self.held.number and key not in self.unusable

    @property
    def _usable(self) -> list[Artifact]:
        announced = () if self.announcement is None else self.announcement.artifacts
        return [artifact for artifact in announced if artifact.key not in self.unusable]

    @property
    def _stop(self) -> int | None:
        """The version before the head at which to stop; None: there is none."""
        if self.stop_from is None or self.held.number >= self.stop_from:
            return None
        stops = (a.key.version for a in self._usable if a.key.version >= self.stop_from)
        return min(stops, default=None)

    def _path_from(self, held: PolicyVersion) -> tuple[Artifact, ...] | None:
        if self.announcement is None:
            return None
        head, artifacts = self.announcement.head, self._usable
        if held.number == head.number and held.root not in (b"", head.root):
            # The number is right and the words are not.
            return plan_fresh(head.number, artifacts)
        return plan_catch_up(held.number, head.number, artifacts)


@dataclass(slots=True)
class Starvation:
    """For how long newer versions have been available and none was taken; ``now`` is monotonic, seconds."""

    _since_s: float | None = None

    def note(self, *, behind_versions: int, is_taken: bool, now: float) -> None:
        """Note an announcement, or a version taken, on the way to the head or the head itself."""
        if not behind_versions:
            self._since_s = None
        elif is_taken or self._since_s is None:
            self._since_s = now

    def for_s(self, now: float) -> float:
        return 0.0 if self._since_s is None else now - self._since_s
