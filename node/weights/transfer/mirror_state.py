"""Compares a mirror's store with its upstream's announcement, and picks what to copy next; pure."""

from dataclasses import dataclass, replace

from node.values.policy import NO_BASE, Announcement, Artifact, ArtifactKey
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, newest_reachable, plan_upload, upload_path
from node.weights.store.offers import is_behind


@dataclass(frozen=True, slots=True)
class MirrorState:
    """The upstream's announcement, this store's whole artifacts, and those it refused."""

    upstream: Announcement | None = None
    own: tuple[Artifact, ...] = ()
    retained: tuple[ArtifactKey, ...] = ()
    """All that is in this store, whole or not."""
    newest: int | None = None
    """The head that this store announced; it never goes back, whatever became of the artifacts."""
    unwanted: frozenset[ArtifactKey] = frozenset()
    """Artifacts this store will not take until something else is announced."""

    def announced(self, upstream: Announcement) -> "MirrorState":
        """Return the state after an announcement."""
        return replace(self, upstream=upstream, unwanted=frozenset())

    def refused(self, key: ArtifactKey) -> "MirrorState":
        """Plan without an artifact."""
        return replace(self, unwanted=self.unwanted | {key})

    @property
    def head_version(self) -> int:
        """The newest version announced."""
        return PUBLIC_VERSION if self.upstream is None else self.upstream.head.number

    @property
    def held_version(self) -> int:
        """The newest version that what is stored leads to."""
        newest = newest_reachable(self.own)
        return PUBLIC_VERSION if newest is None else newest

    @property
    def lets_choose(self) -> bool:
        """Whether a source may choose the way: not while this store refuses something of it."""
        return not self.unwanted

    def path(self) -> tuple[Artifact, ...]:
        """Return what moves this store to the head with the fewest bytes; empty if none does."""
        return upload_path(self._offered(), remote=self.own, head=self.head_version)

    def next_artifact(self) -> Artifact | None:
        """Return what to copy now; None: the store has all that it would retain."""
        return next(iter(plan_upload(self._offered(), remote=self.own, head=self.head_version)), None)

    def can_start(self, key: ArtifactKey) -> bool:
        """Whether an artifact makes something newer than what is stored, of what is stored."""
        is_here = key.base_version in (self.held_version, PUBLIC_VERSION, NO_BASE)
        return is_here and key.version > self.held_version and key not in self.unwanted

    def _offered(self) -> tuple[Artifact, ...]:
        artifacts = () if self.upstream is None else self.upstream.artifacts
        return tuple(artifact for artifact in artifacts if self._would_take(artifact.key))

    def _would_take(self, key: ArtifactKey) -> bool:
        # What upstream keeps from before this store's head is refused, and nothing is wrong with it.
        return key not in self.unwanted and not is_behind(key, retained=self.retained, newest=self.newest)
