"""What to fetch next, what to drop, what not to believe.

announced  an announcement is not signed: it says what to ask for; only what contradicts a
           signed version seen before is refused
next       first artifact of the cheapest way from what is held to the head
useless    the cheapest way to a newer head does not need the fetch under way
failed     an artifact that cannot be used: plan around it until it is announced again
"""

from dataclasses import dataclass, replace

from node.policy import NO_BASE, Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.planning.chain import PUBLIC_VERSION, plan_catch_up, plan_fresh
from node.weights.store.high_water import HighWater


@dataclass(frozen=True, slots=True)
class SyncState:
    """What a sampler holds and knows of."""

    held: PolicyVersion
    """The newest version in memory, verified or the base model; the next delta starts from it."""
    high_water: HighWater
    announcement: Announcement | None = None
    unusable: frozenset[ArtifactKey] = frozenset()

    def announced(self, announcement: Announcement) -> "SyncState":
        """Take an announcement in.

        Raises:
            RefusedError: FENCED or ROLLBACK: a signed version contradicts it.
        """
        self.high_water.admit(learner_epoch=announcement.learner_epoch, version=announcement.head)
        return replace(self, announcement=announcement, unusable=frozenset())

    def advanced(self, held: PolicyVersion, high_water: HighWater) -> "SyncState":
        """Note a version that was fetched and verified, or begin again from another."""
        return replace(self, held=held, high_water=high_water)

    def failed(self, key: ArtifactKey) -> "SyncState":
        """Plan without an artifact."""
        return replace(self, unusable=self.unusable | {key})

    def reconsidered(self) -> "SyncState":
        """Plan with every artifact again: some faults pass."""
        return replace(self, unusable=frozenset())

    @property
    def is_at_head(self) -> bool:
        """Whether what is held is the newest announced version, words and all."""
        return self.announcement is not None and self.held == self.announcement.head

    def next_artifact(self) -> Artifact | None:
        """Give what to fetch now; None: the head is held, or there is no way to it."""
        path = self._path_from(self.held)
        return path[0] if path else None

    def path(self) -> tuple[Artifact, ...]:
        """Return the cheapest way to the head in bytes; empty where the head is held, or there is no way."""
        return self._path_from(self.held) or ()

    @property
    def behind_versions(self) -> int:
        """How far the announced head is ahead of what is held."""
        head = self.held.number if self.announcement is None else self.announcement.head.number
        return max(0, head - self.held.number)

    def can_start(self, key: ArtifactKey) -> bool:
        """Whether an artifact makes something newer than what is held, of what is here."""
        is_here = key.base_version in (self.held.number, PUBLIC_VERSION, NO_BASE)
        return is_here and key.version > self.held.number and key not in self.unusable

    def is_useless(self, key: ArtifactKey) -> bool:
        """Whether the cheapest way to the head does not need what ``key`` makes any more.

        It may bring the head nearer all the same: see ``node.weights.planning.pursuit``.
        """
        if self.announcement is not None and key.version > self.announcement.head.number:
            return False  # a source sent it before it was announced
        path = self._path_from(self.held)
        rest = self._path_from(PolicyVersion(key.version))
        return path is not None and (rest is None or _price(path) <= _price(rest))

    def _path_from(self, held: PolicyVersion) -> tuple[Artifact, ...] | None:
        if self.announcement is None:
            return None
        head = self.announcement.head
        artifacts = [a for a in self.announcement.artifacts if a.key not in self.unusable]
        if held.number == head.number and held.root not in (b"", head.root):
            # The number is right and the words are not.
            return plan_fresh(head.number, artifacts)
        return plan_catch_up(held.number, head.number, artifacts)


def _price(path: tuple[Artifact, ...]) -> tuple[int, int]:
    return sum(artifact.size_bytes for artifact in path), len(path)
