"""Which versions were ever published: those the store offers now, and those the log remembers."""

import contextlib
from dataclasses import dataclass

from node.coordinator.work.accounts import Accounts
from node.errors import RefusedError
from node.policy import PolicyVersion
from node.weights.store.artifact_store import ArtifactStore


@dataclass(frozen=True, slots=True)
class Published:
    """Every version a peer may hold or have sampled with."""

    store: ArtifactStore
    accounts: Accounts

    def head(self) -> PolicyVersion | None:
        announcement = self.store.announcement()
        return None if announcement is None else announcement.head

    def has(self, number: int) -> bool:
        """Whether a version was ever announced, or is the base model, which needs no announcing."""
        if number == 0 or number in self.accounts.versions:
            return True
        announcement = self.store.announcement()
        # Announced since the log was last written.
        return announcement is not None and any(a.key.version == number for a in announcement.artifacts)

    def unlogged(self) -> tuple[PolicyVersion, ...]:
        """Return the versions on offer that are not in the log, oldest first. Blocks on the store's lock."""
        announcement = self.store.announcement()
        artifacts = () if announcement is None else announcement.artifacts
        fresh = {a.key.version: a.key for a in artifacts if a.key.version not in self.accounts.versions}
        versions = []
        for _, key in sorted(fresh.items()):
            # One that is being removed was announced long ago; no peer holds it any more.
            with contextlib.suppress(RefusedError):
                versions.append(self.store.manifest(key).policy_version)
        return tuple(versions)
